"""The DeepSpeed engine on real ranks: gradients do not depend on how the batch is divided."""

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
    else:
        # Two buckets are used alternately, and the embedding fits in neither.
        zero |= {"overlap_comm": True, "reduce_bucket_size": 500}
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
    """A language model with an embedding, one frozen and two trained layers, a norm, and an output layer tied to the
    embedding."""

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
    """Return the sum of the next-token losses of right-padded rows."""
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    logprobs = model(padded)[:, :-1].gather(-1, padded[:, 1:, None])[..., 0]
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in ids], batch_first=True)[:, 1:]
    return -(logprobs * mask).sum()


def run_step(engine: Any, world: Any, data: list[Tensor], micro_batch: int, naive: bool = False) -> None:
    """Run the forward and backward passes of all micro-batches of one step, without the optimizer step."""
    custom = data[world.rank :: world.size]
    num_tokens = sum(len(row) - 1 for row in data)
    micro_batches = [custom[i : i + micro_batch] for i in range(0, len(custom), micro_batch)]
    for i, rows in enumerate(micro_batches):
        loss = summed_loss(engine, rows)
        own_mean = 1 / sum(len(row) - 1 for row in rows) / len(micro_batches)
        loss = loss * (own_mean if naive else world.size / num_tokens)
        engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
        engine.backward(loss, scale_wrt_gas=False)
        if i < len(micro_batches) - 1:
            engine.step()


def train_two_steps(multipliers: dict[str, float]) -> dict[str, np.ndarray]:
    """Train with a warmup of two steps under ZeRO-3, and return the weights."""
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine, iter_full_parameters, take_optimizer_step
    from dsreason.job.ranks import init_world

    world = init_world()
    optim = OptimConfig(lr_multipliers=multipliers, weight_decay=0.1)
    engine = build_engine(TinyLM(), optim, ds_config("zero3"))
    for lr in RATES:
        run_step(engine, world, samples(), 1)
        take_optimizer_step(engine, lr)
    return {name: tensor.numpy().copy() for name, tensor in iter_full_parameters(engine)}


RATES = (5e-3, 1e-2)


def train_with_plain_adamw() -> dict[str, np.ndarray]:
    """Train like `train_two_steps` with torch alone, with hand-written groups: `up` at 0.1, and the norm at 4 times the rate."""
    model = TinyLM()
    groups = [
        ([model.embed.weight, model.down.weight], 1.0, 0.1),
        ([model.down.bias], 1.0, 0.0),
        ([model.up.weight], 0.1, 0.1),
        ([model.up.bias], 0.1, 0.0),
        ([model.norm.weight, model.norm.bias], 4.0, 0.0),
    ]
    optimizer = torch.optim.AdamW([{"params": members, "weight_decay": decay} for members, _, decay in groups])
    for lr in RATES:
        for sample in samples():
            (summed_loss(model, [sample]) / sum(length - 1 for length in LENGTHS)).backward()
        for group, (_, multiplier, _) in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = multiplier * lr
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("ranks", "tolerance"), [(1, 1e-7), (2, 1e-6)])  # two ranks add gradients in a different order
def test_multipliers_match_groups_of_plain_adamw(ranks: int, tolerance: float) -> None:
    result = run_on_ranks(train_two_steps, ranks, {"up": 0.1, "norm": 4.0})[0]
    expected = train_with_plain_adamw()
    assert result.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(result[name] - values).max() <= tolerance, name


Gradients = dict[str, np.ndarray]


def take_gradients(engine: Any, world: Any, data: list[Tensor], micro_batch: int, naive: bool = False) -> Gradients:
    """Return the gradients of one step, and under "norm" their norm as reported by the engine."""
    from dsreason.engine.engine import get_grad_norm
    from tests.engines import full_gradients

    run_step(engine, world, data, micro_batch, naive)
    result = {name: grad.numpy() for name, grad in full_gradients(engine).items()}
    engine.step()
    return result | {"norm": np.array([get_grad_norm(engine)])}


def gradients_on_ranks(micro_batches: tuple[int, ...], naive: bool = False) -> dict[tuple[str, int], Gradients]:
    """Return the gradients of every stage and micro-batch size.

    Steps with other numbers of micro-batches run in between; their gradients must not influence the result.
    """
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine, set_learning_rate
    from dsreason.job.ranks import init_world

    world, result = init_world(), {}
    for stage in STAGES:
        engine = build_engine(TinyLM(), OptimConfig(), ds_config(stage))
        set_learning_rate(engine, 0.0)
        for micro_batch in micro_batches:
            take_gradients(engine, world, samples()[: 2 * world.size], 1)
            result[stage, micro_batch] = take_gradients(engine, world, samples(), micro_batch, naive)
    return result


def plain_gradients() -> Gradients:
    model, data = TinyLM(), samples()
    (summed_loss(model, data) / sum(len(row) - 1 for row in data)).backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    return grads | {"norm": np.array([np.sqrt(sum((g**2).sum() for g in grads.values()))])}


def worst_difference(a: Gradients, b: Gradients) -> float:
    assert a.keys() == b.keys()
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in b)


def accumulation_errors(data_types: dict[str, str]) -> dict[str, float]:
    """Return how far the gradient accumulated over 64 bf16 micro-batches deviates from the sum of the 64 individual gradients."""
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine, set_learning_rate
    from dsreason.job.ranks import init_world
    from tests.engines import full_gradients

    world, errors = init_world(), {}
    data = samples() * (8 * world.size)
    for stage in STAGES:
        engine = build_engine(TinyLM(), OptimConfig(), ds_config(stage, bf16=True) | {"data_types": data_types})
        set_learning_rate(engine, 0.0)
        accumulated = take_gradients(engine, world, data, 1)
        total = {name: np.zeros(grad.shape) for name, grad in accumulated.items() if name != "norm"}
        scale = sum(len(row) - 1 for row in data)
        for i in range(0, len(data), world.size):
            loss = summed_loss(engine, [data[i + world.rank]]) * world.size / scale
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(loss, scale_wrt_gas=False)
            for name, grad in full_gradients(engine).items():
                total[name] += grad.numpy()
            engine.step()
        del accumulated["norm"]
        errors[stage] = worst_difference(accumulated, total)
    return errors


def norms_of_a_broken_step(bf16: bool) -> dict[str, float]:
    """Return, per stage, the reported norm of a step whose gradient is NaN only on the last rank."""
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine, get_grad_norm
    from dsreason.job.ranks import init_world

    world, result = init_world(), {}
    for stage in STAGES:
        engine = build_engine(TinyLM(), OptimConfig(), ds_config(stage, bf16=bf16, clip=1.0))
        loss = summed_loss(engine, samples()[:1])
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss * (float("nan") if world.rank == world.size - 1 else 1.0), scale_wrt_gas=False)
        engine.step()
        result[stage] = get_grad_norm(engine)
    return result


def gathered_parameters(bucket_mb: float) -> dict[str, Any]:
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine, iter_full_parameters
    from dsreason.job.ranks import init_world

    init_world()
    result = {}
    for stage in STAGES:
        engine = build_engine(TinyLM(), OptimConfig(), ds_config(stage, bf16=True))
        for master in (False, True):
            tensors = iter_full_parameters(engine, bucket_mb, master=master)
            result[stage, master] = {
                name: (str(tensor.dtype), tensor.float().numpy().copy()) for name, tensor in tensors
            }
    return result


def on_two_ranks() -> dict[str, Any]:
    """Collect all measurements on two ranks, so that the processes are started only once."""
    return {
        "gradients": gradients_on_ranks((2,)),
        "naive gradients": gradients_on_ranks((2,), naive=True),
        "fp32 accumulation": accumulation_errors({"grad_accum_dtype": "fp32"}),
        "bf16 accumulation": accumulation_errors({"grad_accum_dtype": "bf16"}),
        "broken": {bf16: norms_of_a_broken_step(bf16) for bf16 in (False, True)},
        "parameters": {bucket_mb: gathered_parameters(bucket_mb) for bucket_mb in (1e-4, 1.0)},
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2)


def test_gradients_do_not_depend_on_batch_split(two_ranks: list[dict[str, Any]]) -> None:
    result = [measured["gradients"] for measured in two_ranks]
    result += [run_on_ranks(gradients_on_ranks, 1, (1, 8))[0], *run_on_ranks(gradients_on_ranks, 4, (2,))]
    assert sum(map(len, result)) == len(STAGES) * (2 + 2 + 4)
    for cases in result:
        for case, grads in cases.items():
            assert worst_difference(grads, plain_gradients()) <= 1e-5, case


def test_averaging_each_micro_batch_changes_gradients(two_ranks: list[dict[str, Any]]) -> None:
    for grads in two_ranks[0]["naive gradients"].values():
        assert worst_difference(grads, plain_gradients()) > 1e-2


def test_accumulating_64_bf16_micro_batches_preserves_precision(two_ranks: list[dict[str, Any]]) -> None:
    for measured in two_ranks:
        assert max(measured["fp32 accumulation"].values()) <= 1e-5
        # Without float32 accumulation, the error is large, so the setting is needed.
        assert min(measured["bf16 accumulation"].values()) > 5e-3


@pytest.mark.parametrize("bf16", [False, True])
def test_nonfinite_gradient_appears_in_reported_norm(two_ranks: list[dict[str, Any]], bf16: bool) -> None:
    for measured in two_ranks:
        assert not np.isfinite(list(measured["broken"][bf16].values())).any()


@pytest.mark.parametrize("bucket_mb", [1e-4, 1.0])
def test_gathered_parameters_omit_tied_duplicates(two_ranks: list[dict[str, Any]], bucket_mb: float) -> None:
    expected = dict(TinyLM().named_parameters())
    for (stage, master), tensors in two_ranks[1]["parameters"][bucket_mb].items():
        assert list(tensors) == list(expected)
        assert "head.weight" not in tensors
        for name, (dtype, values) in tensors.items():
            assert dtype == ("torch.float32" if master and not name.startswith("frozen") else "torch.bfloat16")
            assert np.array_equal(values, expected[name].detach().bfloat16().float().numpy()), (stage, name)
