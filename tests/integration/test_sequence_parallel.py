"""Ranks that compute each row together have the loss and the gradients of one rank that computes it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_on_ranks
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference

pytestmark = pytest.mark.integration

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
Found = tuple[float, Gradients]
"""Loss and gradients."""

CASES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "rows of few samples": {"train": {"max_tokens_per_micro_batch": 200}},
    "recomputed": {"model": {"gradient_checkpointing": True}},
    "frozen tower": {"model": {"freeze": ["visual"]}},
}
"""By name: settings beside the usual ones."""


def run_config(rows: str, model: str, ranks_per_row: int, sections: dict[str, Any]) -> Any:
    from dsreason.config.schema import SFTConfig

    usual: dict[str, Any] = {
        "model": {"path": model, "gradient_checkpointing": False},
        "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
        "train": {"precision": "fp32", "global_batch_size": 8, "sequence_parallel_size": ranks_per_row},
    }
    merged = {name: usual.get(name, {}) | sections.get(name, {}) for name in usual | sections}
    return SFTConfig.model_validate(merged)


def sft_gradients(rows: str, models: list[str], ranks_per_row: int, names: list[str]) -> list[Found] | None:
    """Of the first step, on rank 0; one for each model and case, in that order."""
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.loader import StepLoader
    from dsreason.data.sources import open_datasets
    from dsreason.job.ranks import gather_objects, init_world, with_row_groups
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.sft.loop import accumulate_gradients
    from dsreason.train.sft.preflight import step_order
    from tests.engines import full_gradients

    world = with_row_groups(init_world(), ranks_per_row)
    found = []
    for model in models:
        for name in names:
            config = run_config(rows, model, ranks_per_row, CASES[name])
            training, _ = open_datasets(config.data)
            loader = StepLoader(
                training,
                build_encoder(config, Path(model)),
                step_order(training, config),
                config,
                exchange=gather_objects,
                rank=world.rank,
                world_size=world.size,
                ranks_per_row=ranks_per_row,
            )
            deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
            engine = build_policy_engine(config, deepspeed, Path(model), world.group)
            loss = accumulate_gradients(engine, next(iter(loader)), world)
            found.append((loss, {name: grad.numpy() for name, grad in full_gradients(engine).items()}))
            engine.destroy()
    return found if world.is_main else None


@pytest.fixture(scope="module")
def models(tiny_qwen2_5_vl: Path, tiny_qwen3_vl: Path) -> list[str]:
    return [str(tiny_qwen2_5_vl), str(tiny_qwen3_vl)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixed_rows(tmp_path_factory.mktemp("rows")))


@pytest.fixture(scope="module")
def alone(rows: str, models: list[str]) -> dict[tuple[str, str], Found]:
    """Of one rank, by family and case."""
    names = ["mixed", "frozen tower"]
    found = run_on_ranks(sft_gradients, 1, rows, models, 1, names)[0]
    return dict(zip(((family, name) for family in FAMILIES for name in names), found, strict=True))


@pytest.fixture(scope="module")
def pairs(rows: str, models: list[str]) -> dict[tuple[str, str], Found]:
    """Of two ranks that compute each row together."""
    found = run_on_ranks(sft_gradients, 2, rows, models, 2, list(CASES))[0]
    return dict(zip(((family, name) for family in FAMILIES for name in CASES), found, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_share_each_row_have_the_gradients_of_one(alone, pairs, name: str, family: str) -> None:
    expected = alone[family, "frozen tower" if name == "frozen tower" else "mixed"]
    loss, gradients = pairs[family, name]
    assert loss == pytest.approx(expected[0], rel=1e-6)
    print(name, family, worst_difference(gradients, expected[1]))
    assert worst_difference(gradients, expected[1]) <= 1e-5
