"""Fused kernels against transformers' own on a GPU: log-probabilities and gradients of packed and padded rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsreason.config.schema import ModelConfig
from dsreason.data.collate import collate, pack
from dsreason.data.types import EncodedSample
from dsreason.models.load import load_model, resolve_model
from dsreason.models.policy import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")


def make_samples() -> list[EncodedSample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (700, 33, 260):
        ids = torch.randint(5, 200, (length,), generator=generator)
        positions = torch.arange(length).repeat(3, 1)
        mask = torch.ones(length, dtype=torch.bool)
        samples.append(EncodedSample(str(length), ids, mask, positions, torch.zeros(length, dtype=torch.int64), {}))
    return samples


def run_policy(folder: Path, dtype: torch.dtype, *, fused: bool, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and gradients, with recomputation as in training."""
    from dsreason.models.policy import enable_gradient_checkpointing

    model = load_model(folder, dtype=dtype, device=DEVICE, fused_kernels=fused)
    enable_gradient_checkpointing(model)
    policy, samples = Policy(model), make_samples()
    batch = pack(samples) if packed else collate(samples, pad_id=0)
    logprobs = policy(batch.to(DEVICE))
    logprobs.mean().backward()
    return logprobs.detach(), {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "cosmos3_omni", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_fused_kernels_equal_those_of_transformers(
    family: str, packed: bool, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    folder = resolve_model(ModelConfig(path=f"tiny:{family}"), tmp_path)
    expected, expected_gradients = run_policy(folder, dtype, fused=False, packed=packed)
    logprobs, gradients = run_policy(folder, dtype, fused=True, packed=packed)
    assert not torch.equal(logprobs, expected)  # other kernels round differently
    assert float((logprobs - expected).norm() / expected.norm()) <= bound
    assert gradients.keys() == expected_gradients.keys()
    difference = sum(float((gradients[n] - g).square().sum()) for n, g in expected_gradients.items())
    total = sum(float(g.square().sum()) for g in expected_gradients.values())
    assert (difference / total) ** 0.5 <= bound
