"""ZeRO-3 with entire blocks as units: gradients equal those of plain autograd, and the order of modules is recorded only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed import run_on_ranks
from tests.integration.lora import LORA, disturb, trained_adapters
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import Gradients, worst_difference

pytestmark = pytest.mark.integration

TEXT_LORA = LORA | {"vision": False, "rank_pattern": {}, "alpha_pattern": {}}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "recomputed": {"model": {"gradient_checkpointing": True}},
    "frozen before the first layer": {"model": {"freeze": ["visual", "embed_tokens"]}},
    "frozen patches": {"model": {"freeze": ["patch_embed", "pos_embed"], "gradient_checkpointing": True}},
    "frozen first layer": {"model": {"freeze": [r"visual\.blocks\.0\.", r"language_model\.layers\.0\."]}},
    "merger alone in the tower": {"model": {"freeze": [r"visual\.(?!merger|deepstack_merger_list)"]}},
    "offload": {"deepspeed": "zero3_offload.json", "model": {"gradient_checkpointing": True}},
    "adapters": {"lora": LORA},
    "adapters on text": {"lora": TEXT_LORA, "model": {"gradient_checkpointing": True}},
    "adapters on experts": {
        "lora": {"rank": 4, "targets": [r"mlp\.experts"]},
        "model": {"gradient_checkpointing": True},
    },
    "router loss": {"train": {"router_loss_weight": 0.1}, "model": {"gradient_checkpointing": True}},
    "adapters beside 4 bits": {"lora": TEXT_LORA, "model": {"quantize": "nf4"}},
}
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def sft_config(rows: str, model: str, sections: dict[str, Any]) -> Any:
    from dsreason.config.schema import SFTConfig

    document: dict[str, Any] = {
        "model": {"path": model, "gradient_checkpointing": False},
        "data": {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}},
        "train": {"precision": "fp32", "global_batch_size": 8, "max_tokens_per_micro_batch": 75},
    }
    merged = {name: values | sections.get(name, {}) for name, values in document.items()}
    return SFTConfig.model_validate(sections | merged)


def plain_gradients(config: Any) -> Gradients:
    """Compute the gradients of the first step with autograd only, in one process."""
    import torch

    from dsreason.engine.router import RouterTerm
    from dsreason.models.freeze import freeze
    from dsreason.models.load import load_model
    from dsreason.models.lora import add_adapters
    from dsreason.models.policy import Policy

    model = load_model(Path(config.model.path), dtype=torch.float32, quantize=config.model.quantize)
    freeze(model, config.model.freeze)
    policy = Policy(model, router_loss_weight=config.train.router_loss_weight)
    if config.lora.rank:
        add_adapters(model, config.lora, seed=config.train.seed)
        disturb(model, config.train.seed + 1)
    batches = first_batches(config, rank=0, world_size=1)
    router = RouterTerm(policy, batches.num_tokens)
    for batch in batches.micro_batches:
        router.add_to(-policy(batch).sum() / batches.num_tokens, batch).backward()
    return {name: p.grad.numpy() for name, p in policy.named_parameters() if p.requires_grad}


def first_batches(config: Any, rank: int, world_size: int, exchange: Any = None) -> Any:
    from dsreason.data.loader import StepLoader
    from dsreason.data.sources import open_datasets
    from dsreason.train.common.global_batches import build_step_order
    from dsreason.train.common.preflight import build_encoder

    training, _ = open_datasets(config.data)
    encoder, order = build_encoder(config, Path(config.model.path)), build_step_order(training, config)
    exchange = exchange or (lambda value: [value])
    return next(iter(StepLoader(training, encoder, order, config, exchange=exchange, rank=rank, world_size=world_size)))


def engine_gradients(cases: list[tuple[str, str, dict[str, Any]]]) -> list[Gradients] | None:
    """Return the gradients of the second of two equal steps, after a forward pass without a backward pass, on rank 0."""
    import torch

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.job.ranks import gather_objects, init_world
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    world, results = init_world(), []
    for rows, model, sections in cases:
        config = sft_config(rows, model, sections)
        deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
        deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        with trained_adapters():
            engine = build_policy_engine(config, deepspeed, Path(model))
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        batches = first_batches(config, world.rank, world.size, gather_objects)
        with torch.no_grad():
            engine(batches.micro_batches[-1])
        for _ in range(2):
            accumulate_gradients(engine, batches, world)
            gradients = full_gradients(engine)
            engine.step()
        results.append({name: gradient.numpy() for name, gradient in gradients.items()})
        engine.destroy()
    return results if world.is_main else None


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixed_rows(tmp_path_factory.mktemp("rows")))


@pytest.fixture(scope="module")
def models(tiny_qwen2_5_vl: Path, tiny_qwen3_vl: Path, tiny_qwen3_vl_moe: Path) -> dict[str, str]:
    folders = {"qwen2_5_vl": tiny_qwen2_5_vl, "qwen3_vl": tiny_qwen3_vl, "qwen3_vl_moe": tiny_qwen3_vl_moe}
    return {family: str(folder) for family, folder in folders.items()}


def sections_of(case: str, family: str) -> dict[str, Any]:
    """Return the settings of a case. Patterns of `model.freeze` must each match a parameter, and Qwen2.5-VL has no
    `pos_embed`."""
    if case == "frozen patches" and family == "qwen2_5_vl":
        return {"model": {"freeze": ["patch_embed"], "gradient_checkpointing": True}}
    return CASES[case]


LAYOUTS = {
    (2, "qwen2_5_vl"): [case for case in CASES if case not in ("adapters on experts", "router loss")],
    (2, "qwen3_vl_moe"): ["recomputed", "adapters on experts"],
    (1, "qwen3_vl_moe"): ["router loss"],
    (2, "qwen3_vl"): ["all", "recomputed", "adapters", "adapters on text"],
    (1, "qwen3_vl"): ["recomputed", "frozen patches", "adapters beside 4 bits"],
}
"""Number of ranks → family → cases."""


@pytest.fixture(scope="module")
def gradients(rows: str, models: dict[str, str]) -> dict[tuple[int, str, str], Gradients]:
    """Compute the gradients by number of ranks, family and case."""
    results = {}
    for ranks in (1, 2):
        keys = [(n, family, case) for (n, family), cases in LAYOUTS.items() for case in cases if n == ranks]
        cases = [(rows, models[family], sections_of(case, family)) for _, family, case in keys]
        results |= dict(zip(keys, run_on_ranks(engine_gradients, ranks, cases)[0], strict=True))
    return results


@pytest.mark.parametrize(
    ("ranks", "family", "case"), [(*layout, case) for layout, cases in LAYOUTS.items() for case in cases]
)
def test_gradients_equal_autograd_gradients(
    gradients: dict[tuple[int, str, str], Gradients],
    rows: str,
    models: dict[str, str],
    ranks: int,
    family: str,
    case: str,
) -> None:
    expected = plain_gradients(sft_config(rows, models[family], sections_of(case, family)))
    assert all(gradient.any() for gradient in expected.values())
    assert worst_difference(gradients[ranks, family, case], expected) <= 1e-5


def count_traces(rows: str, model: str) -> tuple[int, int, int]:
    """Run training steps and all kinds of forward passes; return the number of traces recorded and dropped, and of modules in
    the last trace."""
    import torch
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.job.ranks import gather_objects, init_world
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.sft.loop import accumulate_gradients

    world = init_world()
    config = sft_config(rows, model, {"model": {"gradient_checkpointing": True}})
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
    engine = build_policy_engine(config, deepspeed, Path(model))
    batches = first_batches(config, world.rank, world.size, gather_objects)
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    recorded, dropped = [], []
    construct, invalidate = Coordinator.construct_parameter_trace_from_module_trace, Coordinator._invalidate_trace
    with (
        mock.patch.object(
            Coordinator,
            "construct_parameter_trace_from_module_trace",
            lambda self: (
                recorded.append(len(self._PartitionedParameterCoordinator__submodule_order)) or construct(self)
            ),
        ),
        mock.patch.object(Coordinator, "_invalidate_trace", lambda self: dropped.append(1) or invalidate(self)),
    ):
        for _ in range(3):
            with torch.no_grad():
                for batch in batches.micro_batches:
                    engine(batch)
            before = len(dropped)
            accumulate_gradients(engine, batches, world)
            engine.step()
            assert coordinator.is_complete_trace()
    return len(recorded), len(dropped) - before, recorded[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_module_order_is_recorded_once(rows: str, models: dict[str, str], family: str) -> None:
    recorded, dropped, modules = run_on_ranks(count_traces, 2, rows, models[family])[0]
    assert (recorded, dropped) == (1, 0)
    # These are the forward pass, recomputation and backward pass of 2 layers, 2 vision blocks and the modules around
    # them.
    assert modules < 60
