"""The DeepSpeed engine on real ranks: gradients do not depend on how the batch was cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_on_ranks

pytestmark = pytest.mark.integration

LENGTHS = (9, 20, 31, 14, 5, 26, 17, 12)
STAGES = ("zero2", "zero3", "zero3_offload")


def ds_config(stage: str, *, bf16: bool = False, clip: float = 0.0) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 2 if stage == "zero2" else 3}
    if stage.startswith("zero3"):
        zero["stage3_param_persistence_threshold"] = 20
    if stage == "zero3_offload":
        zero |= {
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class TinyLM(nn.Module):
    """Embedding, a frozen and two trained layers, a norm, and a head tied to the embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(37, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.up = nn.Linear(16, 48)
        self.down = nn.Linear(48, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.frozen(hidden)
        hidden = self.norm(hidden + self.down(torch.relu(self.up(hidden))))
        return self.head(hidden).float().log_softmax(-1)


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(37, (length,), generator=generator) for length in LENGTHS]


def summed_loss(model: Any, ids: list[Tensor]) -> Tensor:
    """Sum of next-token losses of right-padded rows."""
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    logprobs = model(padded)[:, :-1].gather(-1, padded[:, 1:, None])[..., 0]
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in ids], batch_first=True)[:, 1:]
    return -(logprobs * mask).sum()


def run_step(engine: Any, world: Any, data: list[Tensor], micro_batch: int, naive: bool = False) -> None:
    """All micro-batches of one step, up to but without the optimizer step."""
    mine = data[world.rank :: world.size]
    num_tokens = sum(len(row) - 1 for row in data)
    micro_batches = [mine[i : i + micro_batch] for i in range(0, len(mine), micro_batch)]
    for i, rows in enumerate(micro_batches):
        loss = summed_loss(engine, rows)
        if naive:
            loss = loss / sum(len(row) - 1 for row in rows) / len(micro_batches)
        else:
            loss = loss * world.size / num_tokens
        engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
        engine.backward(loss, scale_wrt_gas=False)
        if i < len(micro_batches) - 1:
            engine.step()


def gradients(stage: str, micro_batch: int, bf16: bool, repeat: int, naive: bool = False) -> dict[str, np.ndarray]:
    from dsreason.config.schema import OptimConfig
    from dsreason.runtime.engine import build_engine, engine_grad_norm, full_gradients
    from dsreason.runtime.world import init_world

    world = init_world()
    engine = build_engine(TinyLM(), OptimConfig(), ds_config(stage, bf16=bf16))
    data = samples() * repeat
    # A first step with another number of micro-batches and a learning rate of 0: nothing of it may stay behind.
    engine.optimizer.param_groups[0]["lr"] = engine.optimizer.param_groups[-1]["lr"] = 0.0
    run_step(engine, world, data[: 2 * world.size], 1)
    engine.step()
    run_step(engine, world, data, micro_batch, naive)
    grads = {name: grad.numpy() for name, grad in full_gradients(engine).items()}
    engine.step()
    grads["norm"] = np.array([engine_grad_norm(engine)])
    return grads


def plain_gradients(repeat: int = 1) -> dict[str, np.ndarray]:
    model, data = TinyLM(), samples() * repeat
    (summed_loss(model, data) / sum(len(row) - 1 for row in data)).backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    grads["norm"] = np.array([np.sqrt(sum((g**2).sum() for g in grads.values()))])
    return grads


def worst_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 8), (2, 2), (4, 2)])
def test_gradients_do_not_depend_on_ranks_and_micro_batches(stage: str, ranks: int, micro_batch: int) -> None:
    for grads in run_on_ranks(gradients, ranks, stage, micro_batch, False, 1):
        assert worst_difference(grads, plain_gradients()) <= 1e-5


def test_mean_per_micro_batch_gives_other_gradients() -> None:
    (grads, _) = run_on_ranks(gradients, 2, "zero3", 2, False, 1, True)
    assert worst_difference(grads, plain_gradients()) > 1e-2
