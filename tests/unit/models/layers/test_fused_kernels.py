"""Modules with fused kernels, compared with transformers' modules on a CPU; plain functions replace Liger's kernels.

The kernels themselves are compared in `tests/gpu/test_fused_kernels_gpu.py`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from dsreason.config.schema import ModelConfig
from dsreason.data.collate import collate, pack
from dsreason.data.types import EncodedSample
from dsreason.families import get_family
from dsreason.models.layers import fused_kernels
from dsreason.models.layers.fused_kernels import FusedAttention, FusedRMSNorm, FusedSwiGLU
from dsreason.models.load import load_model, resolve_model
from dsreason.models.policy import Policy, enable_gradient_checkpointing

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "cosmos3_omni", "qwen3_5", "qwen2", "qwen3")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `liger_kernel` functions that compute what its kernels compute."""
    modules = {
        "liger_kernel.ops.rope": {"LigerRopeFunction": SimpleNamespace(apply=apply_rotary_pos_emb)},
        "liger_kernel.ops.swiglu": {
            "LigerSiLUMulFunction": SimpleNamespace(apply=lambda gate, up: torch.nn.functional.silu(gate) * up)
        },
    }
    for name in ("liger_kernel", "liger_kernel.ops", *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        fused_kernels.importlib.util, "find_spec", lambda name: True if name == "liger_kernel" else find_spec(name)
    )


def make_samples() -> list[EncodedSample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (30, 7, 18):
        ids = torch.randint(5, 200, (length,), generator=generator)
        types = torch.zeros(length, dtype=torch.int64)
        positions = torch.arange(length).repeat(3, 1)
        samples.append(EncodedSample("s", ids, torch.ones(length, dtype=torch.bool), positions, types, {}))
    return samples


def run_policy(folder: Path, *, fused: bool, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = load_model(folder, dtype=torch.float32, fused_kernels=fused)
    enable_gradient_checkpointing(model)
    plain = get_family(model.config.model_type).has_plain_layers
    assert (fused and plain) == any(type(module) is FusedRMSNorm for module in model.modules())
    is_dense = model.config.model_type != "qwen3_vl_moe"
    assert (fused and is_dense) == (type(model.get_decoder().layers[0].mlp) is FusedSwiGLU)
    assert (fused and plain) == (type(model.get_decoder().layers[-1].self_attn) is FusedAttention)
    samples = make_samples()
    logprobs = Policy(model)(pack(samples) if packed else collate(samples, pad_id=0))
    logprobs.sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_equal_those_of_transformers(liger: None, family: str, packed: bool, tmp_path: Path) -> None:
    folder = resolve_model(ModelConfig(path=f"tiny:{family}"), tmp_path)
    expected, expected_gradients = run_policy(folder, fused=False, packed=packed)
    logprobs, gradients = run_policy(folder, fused=True, packed=packed)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1))


def test_norm_rounds_once_in_bfloat16(tiny_qwen3_vl: Path) -> None:
    """Check that the norm is within one rounding of transformers', which rounds twice, and closer to the exact values."""
    model = load_model(tiny_qwen3_vl, dtype=torch.bfloat16)
    norm = model.get_decoder().norm
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, norm.weight.shape[0], generator=generator).bfloat16()
    norm.weight.data = torch.randn(norm.weight.shape, generator=generator).bfloat16()
    wide = hidden.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.double()
    expected = norm(hidden).double()
    norm.__class__ = FusedRMSNorm
    fused = norm(hidden).double()
    assert float(((fused - expected).abs() / expected.abs().clamp(min=1e-6)).max()) <= 2**-7
    assert float((fused - exact).norm()) <= float((expected - exact).norm())


def test_without_liger_only_norms_are_fused(
    tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused_kernels.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        model = load_model(tiny_qwen3_vl, dtype=torch.float32, fused_kernels=True)
    assert "liger-kernel is not installed" in caplog.text and "dsreason[cuda]" in caplog.text
    layer = model.get_decoder().layers[0]
    assert type(layer.input_layernorm) is FusedRMSNorm and type(layer.mlp) is not FusedSwiGLU
