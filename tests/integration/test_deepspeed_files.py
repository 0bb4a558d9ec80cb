"""The shipped DeepSpeed files work with real engines, and the list of removed keys matches the installed DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.deepspeed_keys import REMOVED, REMOVED_ZERO
from dsreason.config.schema import SFTConfig
from dsreason.engine.engine import build_engine
from dsreason.job.ranks import init_world, shutdown
from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

FILES = ("zero2.json", "zero3.json", "zero3_offload.json")


def train(precision: str) -> dict[str, list[float]]:
    """Train five steps of two micro-batches with each shipped file; return the losses."""
    world = init_world()
    config = SFTConfig.model_validate(
        {"train": {"precision": precision, "global_batch_size": 8, "micro_batch_size": 2}, "optim": {"lr": 1e-2}}
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    losses: dict[str, list[float]] = {}
    for name in FILES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(dtype)
        engine = build_engine(model, config.optim, resolve_deepspeed(name, config, device="cpu", world_size=world.size))
        torch.manual_seed(1 + world.rank)
        inputs = torch.randn(2, 2, 256, dtype=dtype)
        losses[name] = []
        for _ in range(5):
            for i, micro_batch in enumerate(inputs):
                engine.set_gradient_accumulation_boundary(i == 1)
                loss = (engine(micro_batch).float() - 1).pow(2).mean() / 2
                engine.backward(loss, scale_wrt_gas=False)
                engine.step()
            losses[name].append(loss.item())
    shutdown()
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_shipped_files_give_equal_losses(precision: str) -> None:
    for losses in run_on_ranks(train, 2, precision):
        assert losses["zero3.json"] == pytest.approx(losses["zero2.json"], rel=1e-5)
        assert losses["zero3_offload.json"] == pytest.approx(losses["zero2.json"], rel=1e-5)
        assert losses["zero2.json"][-1] < losses["zero2.json"][1]


def test_removed_keys_match_installed_deepspeed() -> None:
    from deepspeed.runtime import config as deepspeed_config

    assert set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == set(REMOVED)
    assert set(deepspeed_config._REMOVED_ZERO_CONFIG_KEYS) == set(REMOVED_ZERO)
