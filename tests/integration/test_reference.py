"""The reference policy on real ranks: its log-probabilities, and that the policy is what it was afterwards."""

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
    from dsreason.engine.engine import build_engine, full_parameters
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.job.ranks import barrier, init_world

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
        return {name: tensor.float().clone() for name, tensor in full_parameters(engine)}

    reference = ReferencePolicy(engine)
    seen = {"first": look()}
    first = weights()
    step()
    seen["trained"], before = look(), weights()
    with reference.in_place():
        seen["in place"] = look()
        in_place = weights()
    seen["back"], after = look(), weights()
    step()
    seen["next"] = look()
    if world.is_main:
        save_file({name: tensor.contiguous() for name, tensor in before.items()}, Path(folder) / "model.safetensors")
    barrier()
    reference.load(Path(folder))
    with reference.in_place():
        seen["loaded"] = look()
    reference.become_policy()
    with reference.in_place():
        seen["reset"] = look()
    return seen | {
        "same weights": all(torch.equal(before[name], after[name]) for name in before),
        "first weights": all(torch.equal(first[name], in_place[name]) for name in first),
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_reference_is_the_first_policy_and_leaves_no_trace(stage: str, bf16: bool, tmp_path: Path) -> None:
    found = run_on_ranks(measure, 2, stage, bf16, str(tmp_path))
    for seen in found:
        assert seen["in place"] == seen["first"]
        assert seen["trained"] != seen["first"]
        assert seen["back"] == seen["trained"]
        assert seen["same weights"] and seen["first weights"]
        assert seen["loaded"] == seen["trained"]
        assert seen["reset"] == seen["next"]
        assert seen["next"] != seen["trained"]
