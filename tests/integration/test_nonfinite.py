"""A step whose loss is NaN: the run either stops and saves the samples, or skips the step and continues."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import run_on_ranks
from tests.integration.command import metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration


def train_with_nan(folder: str, model: str, rows: str, rule: str) -> str:
    """Train three steps, of which the second has a NaN loss on rank 1; return how the run ended."""
    from dsreason.config.schema import SFTConfig
    from dsreason.errors import DsReasonError
    from dsreason.job.ranks import init_world
    from dsreason.losses.sft import compute_sft_loss
    from dsreason.train.sft import loop as sft

    world, losses = init_world(), []

    def poisoned(logprobs: torch.Tensor, **rest: Any) -> torch.Tensor:
        losses.append(compute_sft_loss(logprobs, **rest))
        return losses[-1] * (float("nan") if world.rank == 1 and len(losses) == 2 else 1.0)

    config = SFTConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
            "train": {
                "max_steps": 3,
                "epochs": 10,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "precision": "fp32",
                "on_nonfinite": rule,
            },
            "checkpoint": {"every": 1, "export": "all"},
        }
    )
    try:
        with mock.patch("dsreason.train.sft.loop.compute_sft_loss", poisoned):
            sft.run(config, output_dir=Path(folder))
    except DsReasonError as error:
        return str(error)
    return "finished"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed_rows(tmp_path_factory.mktemp("rows"))


def test_nonfinite_loss_stops_run_and_saves_samples(tiny_qwen2_5_vl: Path, rows: Path, tmp_path: Path) -> None:
    train = partial(train_with_nan, rule="stop")
    ended = run_on_ranks(train, 2, str(tmp_path / "run"), str(tiny_qwen2_5_vl), str(rows))
    assert ended[0] == ended[1]
    assert ended[0].startswith("step 2: loss nan, gradient norm ")
    saved = tmp_path / "run/nonfinite/step_2"
    assert str(saved) in ended[0]
    ids = [name for rank in (0, 1) for batch in json.loads((saved / f"rank_{rank}.json").read_text()) for name in batch]
    assert len([name for name in ids if name.isdigit()]) == 4
    tensors = load_file(saved / "rank_1.safetensors")
    assert {"0.input_ids", "0.targets", "0.predictors", "0.segments"} <= tensors.keys()
    # Each segment is described by its start, length and parent.
    assert tensors["0.input_ids"].shape == (1, tensors["0.segments"][:, 1].sum())
    # This checkpoint may still have been incomplete when the run stopped.
    assert (tmp_path / "run/checkpoints/step_1/COMPLETE").exists()


def test_nonfinite_step_is_skipped_and_counted(tiny_qwen2_5_vl: Path, rows: Path, tmp_path: Path) -> None:
    train = partial(train_with_nan, rule="skip")
    ended = run_on_ranks(train, 2, str(tmp_path / "run"), str(tiny_qwen2_5_vl), str(rows))
    assert ended == ["finished", "finished"]
    first, second, third = (
        load_file(tmp_path / f"run/export/{name}/model.safetensors") for name in ("step_1", "step_2", "final")
    )
    assert all(first[name].equal(second[name]) for name in first)
    assert all(torch.isfinite(third[name]).all() for name in third)
    assert not all(second[name].equal(third[name]) for name in second)
    (skipped,) = (line for line in metrics(tmp_path / "run") if "train/skipped_steps" in line)
    assert skipped["step"] == 2 and skipped["train/skipped_steps"] == 1
    assert "train/loss" not in skipped
