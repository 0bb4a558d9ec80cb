"""The choice of training states that leave the GPU during rollouts."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dsreason.config.schema_grpo import OffloadMode
from dsreason.engine.offload import StateOffload
from dsreason.engine.rollout_memory import EVERYTHING, GIB, NOTHING, OffloadAmount, RolloutMemory
from dsreason.errors import ConfigError
from dsreason.train.common import sampler

FITTING = RolloutMemory(
    total=80 * GIB, vllm=40 * GIB, fixed=0, gradients=4 * GIB, moments=8 * GIB, masters=4 * GIB, sync=0, outside=0
)
TIGHT = replace(FITTING, outside=30 * GIB)
"""Memory that does not fit: with 5 % of training's 16 GiB, 86.8 GiB, which is 6.8 GiB too much (2.8 without gradients)."""


def open_offload(mode: OffloadMode, share: float | None, device: str = "cuda") -> StateOffload:
    """Open the offload of a rank whose memory fits, if another rank's memory does not fit."""
    engine = SimpleNamespace(device=torch.device(device))
    with (
        mock.patch.object(StateOffload, "measure", return_value=FITTING),
        mock.patch.object(StateOffload, "describe", return_value="offload"),
        mock.patch.object(sampler, "gather_objects", side_effect=lambda memory: [memory, TIGHT]),
    ):
        return sampler.open_offload(engine, mode, share, bucket_bytes=0, num_ranks=2)


def test_every_rank_offloads_like_the_fullest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        amount = open_offload("auto", 0.5).amount
    assert amount.drop_gradients
    assert amount.move_bytes == pytest.approx(2.8 * GIB, abs=2)
    (line,) = caplog.messages
    assert 'rollout.offload = "auto"' in line
    assert "= 86.80 GiB of the GPU's 80.00 GiB" in line


def test_offload_always_moves_the_whole_optimizer() -> None:
    assert open_offload("always", 0.5).amount == OffloadAmount(True, 12 * GIB)


def test_offload_never_is_rejected_without_memory() -> None:
    with pytest.raises(ConfigError, match=r"2\.80 GiB are missing"):
        open_offload("never", 0.5)


@pytest.mark.parametrize(("mode", "amount"), [("auto", EVERYTHING), ("always", EVERYTHING), ("never", NOTHING)])
@pytest.mark.parametrize(("share", "device"), [(None, "cuda"), (0.5, "cpu")])
def test_memory_is_measured_only_for_vllm(
    mode: OffloadMode, amount: OffloadAmount, share: float | None, device: str
) -> None:
    assert open_offload(mode, share, device).amount == amount
