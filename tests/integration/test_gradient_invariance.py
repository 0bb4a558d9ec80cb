"""A global batch gives the same gradient however it is divided among ranks, accumulation steps and micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed import run_on_ranks
from tests.integration.lora import lora_config, trained_adapters
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

Gradients = dict[str, np.ndarray]
Case = tuple[str, str, dict[str, object], bool]
"""Rows, model folder, settings of [train], and whether adapters are trained."""


def gradients_on_rank(cases: list[Case], naive: bool = False) -> list[Gradients] | None:
    """Return the full gradients of each case's first step, on rank 0; with `naive`, each micro-batch is averaged separately."""
    from dsreason.job.ranks import init_world
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    world = init_world()
    result = []
    for rows, model, settings, lora in cases:
        config = lora_config(rows, model, train=settings) if lora else run_config(rows, model, settings)
        with trained_adapters():
            engine, batches = first_step(config, Path(model), world)
        if naive:
            backward_mean_of_means(engine, batches)
        else:
            accumulate_gradients(engine, batches, world)
        result.append({name: grad.numpy() for name, grad in full_gradients(engine).items()})
        engine.destroy()
    return result if world.is_main else None


def first_step(config, model: Path, world, deepspeed_defaults: bool = False):
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.data.loader import StepLoader
    from dsreason.data.sources import open_datasets
    from dsreason.job.ranks import gather_objects
    from dsreason.train.common.global_batches import build_step_order
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    training, _ = open_datasets(config.data)
    encoder, order = build_encoder(config, model), build_step_order(training, config)
    loader = StepLoader(
        training, encoder, order, config, exchange=gather_objects, rank=world.rank, world_size=world.size
    )
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
    if deepspeed_defaults:
        del deepspeed["data_types"], deepspeed["communication_data_type"]
    return build_policy_engine(config, deepspeed, model), next(iter(loader))


def run_config(rows: str, model: str, settings: dict[str, object]):
    from dsreason.config.schema import SFTConfig

    train = {"precision": "fp32", "global_batch_size": 8, **settings}
    model_section = {"path": model, "gradient_checkpointing": False}
    data = {"adapter": "jsonl", "path": rows, "workers": 0, "vision": {"fps": 4.0}}
    return SFTConfig.model_validate({"model": model_section, "data": data, "train": train})


def backward_mean_of_means(engine, batches) -> None:
    for i, batch in enumerate(batches.micro_batches):
        engine.set_gradient_accumulation_boundary(i == len(batches.micro_batches) - 1)
        loss = -engine(batch).mean() / len(batches.micro_batches)
        engine.backward(loss, scale_wrt_gas=False)
        if i < len(batches.micro_batches) - 1:
            engine.step()


def worst_difference(a: Gradients, b: Gradients) -> float:
    """Return the largest ||a - b|| / ||b|| of a single tensor."""
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[name] - b[name]) / max(np.linalg.norm(b[name]), 1e-12)) for name in b)


def overall_difference(a: Gradients, b: Gradients) -> float:
    """Return ||a - b|| / ||b|| over all tensors together."""
    return float(np.sqrt(sum(np.sum((a[n] - b[n]) ** 2) for n in b) / sum(np.sum(b[n] ** 2) for n in b)))


# The names are ranks x accumulation x micro-batch size (1x8x1, 2x2x2 and 4x1x2), or the length of the rows in tokens.
CUTS = {
    "1x8x1": (1, {"micro_batch_size": 1}),
    "1 row": (1, {}),
    "1 rank, rows of 70": (1, {"max_tokens_per_micro_batch": 70}),
    "2x2x2": (2, {"micro_batch_size": 2}),
    "2 ranks, a row each": (2, {}),
    "2 ranks, rows of 70": (2, {"max_tokens_per_micro_batch": 70}),
    "2 ranks, padded rows": (2, {"packing": False, "max_tokens_per_micro_batch": 256}),
    "4x1x2": (4, {"micro_batch_size": 2}),
    "4 ranks, rows of 75": (4, {"max_tokens_per_micro_batch": 75}),
}
WHOLE = {"packing": False, "micro_batch_size": 8}
TRAINED = {"qwen2_5_vl": ("qwen2_5_vl", False), "qwen3_vl": ("qwen3_vl", False), "adapters": ("qwen3_vl", True)}
"""Name → model family, and whether adapters are trained."""


@pytest.fixture(scope="module")
def models(tiny_qwen2_5_vl: Path, tiny_qwen3_vl: Path) -> dict[str, str]:
    return {"qwen2_5_vl": str(tiny_qwen2_5_vl), "qwen3_vl": str(tiny_qwen3_vl)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixed_rows(tmp_path_factory.mktemp("rows")))


@pytest.fixture(scope="module")
def gradients(rows: str, models: dict[str, str]) -> dict[tuple[str, str], Gradients]:
    """Compute gradients by batch split and trained model. Cases with the same number of ranks share their processes."""
    expected = {"1x1x8": (1, WHOLE), **CUTS}
    result = {}
    for ranks in (1, 2, 4):
        keys = [(cut, subject) for cut in expected if expected[cut][0] == ranks for subject in TRAINED]
        cases = [(rows, models[TRAINED[subject][0]], expected[cut][1], TRAINED[subject][1]) for cut, subject in keys]
        result |= dict(zip(keys, run_on_ranks(gradients_on_rank, ranks, cases)[0], strict=True))
    return result


@pytest.mark.parametrize("what", TRAINED)
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_do_not_depend_on_batch_split(gradients, cut, what):
    assert all(gradient.any() for gradient in gradients[cut, what].values())
    assert worst_difference(gradients[cut, what], gradients["1x1x8", what]) <= 1e-5


def test_micro_batch_mean_depends_on_batch_split(gradients, rows, models):
    cases = [(rows, models["qwen2_5_vl"], {"micro_batch_size": 1}, False)]
    naive = run_on_ranks(gradients_on_rank, 1, cases, True)[0][0]
    assert worst_difference(naive, gradients["1x1x8", "qwen2_5_vl"]) > 1e-2


def bf16_gradients_on_rank(rows: str, model: str, deepspeed_defaults: bool) -> tuple[Gradients, Gradients]:
    """Return the gradient accumulated over 64 micro-batches, and the float64 sum of the 64 individual gradients (learning rate
    0)."""
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import init_world
    from dsreason.losses.sft import compute_sft_loss
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    world = init_world()
    config = run_config(rows, model, {"precision": "bf16", "global_batch_size": 64, "micro_batch_size": 1})
    engine, batches = first_step(config, Path(model), world, deepspeed_defaults=deepspeed_defaults)
    set_learning_rate(engine, 0.0)
    total: Gradients = {}
    for batch in batches.micro_batches:
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(compute_sft_loss(engine(batch), num_tokens=batches.num_tokens), scale_wrt_gas=False)
        for name, grad in full_gradients(engine).items():
            total[name] = total.get(name, 0.0) + grad.double().numpy()
        engine.step()
    accumulate_gradients(engine, batches, world)
    return {name: grad.numpy() for name, grad in full_gradients(engine).items()}, total


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("deepspeed_defaults", "holds"), [(False, True), pytest.param(True, False, marks=pytest.mark.nightly)]
)
def test_bf16_accumulates_64_micro_batches_in_float32(tmp_path, models, deepspeed_defaults, holds):
    rows = str(write_mixed_rows(tmp_path, 64))
    accumulated, exact = run_on_ranks(bf16_gradients_on_rank, 1, rows, models["qwen2_5_vl"], deepspeed_defaults)[0]
    assert (overall_difference(accumulated, exact) <= 5e-3) is holds


def two_steps_on_rank(rows: str, model: str) -> tuple[Gradients, Gradients]:
    """Run the same step twice with learning rate 0, with the text-only micro-batches first; return the gradients of both
    steps."""
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import init_world
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    world = init_world()
    engine, batches = first_step(run_config(rows, model, {"micro_batch_size": 1}), Path(model), world)
    batches.micro_batches.reverse()
    set_learning_rate(engine, 0.0)
    result = []
    for _ in range(2):
        accumulate_gradients(engine, batches, world)
        result.append({name: grad.numpy() for name, grad in full_gradients(engine).items()})
        engine.step()
    return result[0], result[1]


def test_gradients_do_not_carry_over_between_steps(rows, models):
    # If a parameter has no gradient in the first micro-batch, DeepSpeed adds to its gradient of the previous step.
    first, second = run_on_ranks(two_steps_on_rank, 1, rows, models["qwen2_5_vl"])[0]
    assert worst_difference(second, first) == 0.0
