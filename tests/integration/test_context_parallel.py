"""Two ranks that compute one clip together get the same output and gradients as one rank, also under ZeRO-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

TEXT = {"cosmos_predict2_5": 128, "wan": 32}
"""Width of the text embeddings of each family's tiny model."""
CASES = {"cosmos_predict2_5": ("cosmos_predict2_5", True), "text": ("cosmos_predict2_5", False), "wan": ("wan", False)}
"""Case → name of the model, and whether the case has conditioning frames, which have separate timesteps."""
RANKS = 2
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def predict(case: str, transformer: Any, frames: int = 3) -> Tensor:
    """Return the predicted velocity of two clips of 12 tokens; a conditioning frame, if any, is the first one of the first
    clip."""
    from dsreason.world.families import FAMILIES
    from dsreason.world.types import Conditioning

    name, value = CASES[case]
    family, shape = FAMILIES[name], (2, 16, frames, 4, 4)
    x, text, s = draw(*shape, seed=0), draw(2, 8, TEXT[name], seed=1), torch.tensor([0.3, 0.8])
    conditioning = None
    if value:
        mask = torch.zeros(2, 1, frames, 1, 1)
        mask[0, :, 0] = 1
        conditioning = Conditioning(draw(*shape, seed=2) * mask, mask)
    return family.velocity(transformer, x, s, text, conditioning, x)


def loss_of(velocity: Tensor) -> Tensor:
    return (velocity * draw(*velocity.shape, seed=3)).sum()


def load(root: str, case: str, deepspeed: dict[str, Any] | None = None, *, parallel: bool) -> Any:
    import torch.distributed as dist

    from dsreason.world.context_parallel import share_tokens
    from dsreason.world.families import FAMILIES
    from dsreason.world.models import load_transformer

    name, _ = CASES[case]
    transformer = load_transformer(Path(root, name), torch.float32, deepspeed)
    if parallel:
        share_tokens(transformer, FAMILIES[name], dist.group.WORLD)
    return transformer


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference between gradients, relative to the largest value of the respective tensor."""
    assert found.keys() == expected.keys()
    assert all(expected[name].abs().max() > 0 for name in expected)
    return max(((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected)


def plain_gradients(transformer: Any, *, summed: bool) -> dict[str, Tensor]:
    import torch.distributed as dist

    gradients = {name: p.grad.clone() for name, p in transformer.named_parameters()}
    if summed:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return gradients


def compare(root: str) -> dict[str, dict[str, float]]:
    import deepspeed

    from dsreason.job.ranks import init_world
    from tests.engines import full_gradients

    init_world()
    result: dict[str, dict[str, float]] = {}
    for case in CASES:
        full = load(root, case, parallel=False)
        expected = predict(case, full)
        loss_of(expected).backward()
        gradients = plain_gradients(full, summed=False)
        for kind in ("plain", "checkpointed"):
            shared = load(root, case, parallel=True)
            if kind == "checkpointed":
                shared.enable_gradient_checkpointing()
            output = predict(case, shared)
            loss_of(output).backward()
            result[f"{case} {kind}"] = {
                "output": (output - expected).abs().max().item(),
                "gradients": worst(plain_gradients(shared, summed=True), gradients),
            }
        sampled = load(root, case, parallel=True)
        with torch.no_grad():
            result[f"{case} sampling"] = {
                "output": (predict(case, sampled) - expected).abs().max().item(),
                "gradients": 0.0,
            }
        partitioned = load(root, case, DS_CONFIG, parallel=True)
        partitioned.enable_gradient_checkpointing()
        engine, *_ = deepspeed.initialize(
            model=partitioned, optimizer=torch.optim.AdamW(partitioned.parameters()), config=DS_CONFIG
        )
        output = predict(case, engine)
        engine.backward(loss_of(output) * RANKS)
        result[f"{case} ZeRO-3"] = {
            "output": (output - expected).abs().max().item(),
            "gradients": worst(full_gradients(engine), gradients),
        }
    return result


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    from dsreason.world.families import FAMILIES

    root = tmp_path_factory.mktemp("worlds")
    for name in TEXT:
        FAMILIES[name].build_tiny(root / name)
    return run_on_ranks(compare, RANKS, str(root))


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "sampling", "ZeRO-3"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_match_single_rank_results(compared: list[dict[str, dict[str, float]]], case: str, kind: str) -> None:
    for rank in compared:
        assert rank[f"{case} {kind}"]["output"] < 1e-5
        assert rank[f"{case} {kind}"]["gradients"] < 1e-4
