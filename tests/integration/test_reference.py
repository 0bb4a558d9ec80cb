"""The reference policy on real ranks: its log-probabilities are right, and computing them does not change the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_on_ranks
from tests.integration.test_engine import TinyLM, ds_config

pytestmark = pytest.mark.integration

STAGES = ("zero2", "zero3", "zero3_offload")


def measure(stage: str, bf16: bool, folder: str) -> dict[str, Any]:
    from safetensors.torch import save_file

    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine, iter_full_parameters
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.job.ranks import init_world, wait_for_ranks

    world = init_world()
    engine = build_engine(TinyLM(), OptimConfig(lr=1e-2), ds_config(stage, bf16=bf16))
    ids = torch.arange(12).reshape(1, 12) % 37

    def look() -> list[Any]:
        with torch.no_grad():
            return engine(ids).tolist()

    def step() -> None:
        for i in range(2):
            engine.set_gradient_accumulation_boundary(i == 1)
            engine.backward(engine(ids).float().square().mean(), scale_wrt_gas=False)
            engine.step()

    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.float().clone() for name, tensor in iter_full_parameters(engine)}

    reference = ReferencePolicy(engine)
    recorded = {"first": look()}
    first = weights()
    step()
    recorded["trained"], before = look(), weights()
    with reference.in_place():
        recorded["in place"] = look()
        in_place = weights()
    recorded["back"], after = look(), weights()
    step()
    recorded["next"] = look()
    if world.is_main:
        save_file({name: tensor.contiguous() for name, tensor in before.items()}, Path(folder) / "model.safetensors")
    wait_for_ranks()
    reference.load(Path(folder))
    with reference.in_place():
        recorded["loaded"] = look()
    reference.update_to_policy()
    with reference.in_place():
        recorded["reset"] = look()
    return recorded | {
        "same weights": all(torch.equal(before[name], after[name]) for name in before),
        "first weights": all(torch.equal(first[name], in_place[name]) for name in first),
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_reference_uses_first_weights_and_preserves_policy(stage: str, bf16: bool, tmp_path: Path) -> None:
    results = run_on_ranks(measure, 2, stage, bf16, str(tmp_path))
    for recorded in results:
        assert recorded["in place"] == recorded["first"]
        assert recorded["trained"] != recorded["first"]
        assert recorded["back"] == recorded["trained"]
        assert recorded["same weights"] and recorded["first weights"]
        assert recorded["loaded"] == recorded["trained"]
        assert recorded["reset"] == recorded["next"]
        assert recorded["next"] != recorded["trained"]
