"""Two ranks that compute one clip together have the output and the gradients of one, also under ZeRO-3."""

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


def predict(name: str, transformer: Any, frames: int = 3) -> Tensor:
    """The velocity of two clips of 12 tokens; for Cosmos the first frame of the first clip is given."""
    from dsreason.world.families import FAMILIES
    from dsreason.world.types import Conditioning

    family, shape = FAMILIES[name], (2, 16, frames, 4, 4)
    x, text, s = draw(*shape, seed=0), draw(2, 8, TEXT[name], seed=1), torch.tensor([0.3, 0.8])
    conditioning = None
    if family.max_conditional_frames:
        mask = torch.zeros(2, 1, frames, 1, 1)
        mask[0, :, 0] = 1
        conditioning = Conditioning(draw(*shape, seed=2) * mask, mask)
    return family.velocity(transformer, x, s, text, conditioning, x)


def loss_of(velocity: Tensor) -> Tensor:
    return (velocity * draw(*velocity.shape, seed=3)).sum()


def load(root: str, name: str, deepspeed: dict[str, Any] | None = None, *, parallel: bool) -> Any:
    import torch.distributed as dist

    from dsreason.world.context_parallel import parallelise
    from dsreason.world.families import FAMILIES
    from dsreason.world.models import load_transformer

    transformer = load_transformer(Path(root, name), torch.float32, deepspeed)
    if parallel:
        parallelise(transformer, FAMILIES[name], dist.group.WORLD)
    return transformer


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a tensor's gradients, relative to the largest value."""
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
    found: dict[str, dict[str, float]] = {}
    for name in TEXT:
        whole = load(root, name, parallel=False)
        expected = predict(name, whole)
        loss_of(expected).backward()
        gradients = plain_gradients(whole, summed=False)
        for kind in ("plain", "checkpointed"):
            shared = load(root, name, parallel=True)
            if kind == "checkpointed":
                shared.enable_gradient_checkpointing()
            output = predict(name, shared)
            loss_of(output).backward()
            found[f"{name} {kind}"] = {
                "output": (output - expected).abs().max().item(),
                "gradients": worst(plain_gradients(shared, summed=True), gradients),
            }
        sampled = load(root, name, parallel=True)
        with torch.no_grad():
            found[f"{name} sampling"] = {
                "output": (predict(name, sampled) - expected).abs().max().item(),
                "gradients": 0.0,
            }
        partitioned = load(root, name, DS_CONFIG, parallel=True)
        partitioned.enable_gradient_checkpointing()
        engine, *_ = deepspeed.initialize(
            model=partitioned, optimizer=torch.optim.AdamW(partitioned.parameters()), config=DS_CONFIG
        )
        output = predict(name, engine)
        engine.backward(loss_of(output) * RANKS)
        found[f"{name} ZeRO-3"] = {
            "output": (output - expected).abs().max().item(),
            "gradients": worst(full_gradients(engine), gradients),
        }
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    from dsreason.world.families import FAMILIES

    root = tmp_path_factory.mktemp("worlds")
    for name in TEXT:
        FAMILIES[name].build_tiny(root / name)
    return run_on_ranks(compare, RANKS, str(root))


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "sampling", "ZeRO-3"])
@pytest.mark.parametrize("name", TEXT)
def test_two_ranks_compute_what_one_does(compared: list[dict[str, dict[str, float]]], name: str, kind: str) -> None:
    for rank in compared:
        assert rank[f"{name} {kind}"]["output"] < 1e-5
        assert rank[f"{name} {kind}"]["gradients"] < 1e-4
