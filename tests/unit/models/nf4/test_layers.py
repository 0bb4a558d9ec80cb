"""Linear layers with 4-bit weights: their outputs, and the tensors that they keep for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsreason.config.schema_lora import LoRAConfig
from dsreason.models.load import load_model
from dsreason.models.lora import add_adapters, describe_trained_share
from dsreason.models.nf4.blocks import ROW_BYTES
from dsreason.models.nf4.layers import NF4Linear, convert_to_nf4, is_quantized, quantize_weight
from dsreason.monitor.flops import compute_model_flops


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_matches_plain_layer_with_dequantized_weight(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 32, bias=bias, dtype=dtype), nn.Linear(32, 3, dtype=dtype))
    model.requires_grad_(False)
    before = model[0].weight.clone()
    (layer,) = convert_to_nf4(model, "0", dtype)
    quantize_weight(layer, "cpu")
    plain = nn.Linear(96, 32, bias=bias, dtype=dtype)
    plain.load_state_dict({"weight": layer.whole()} | ({"bias": layer.bias} if bias else {}))
    assert not torch.equal(plain.weight, before)
    inputs = [torch.randn(2, 5, 96, dtype=dtype, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    gradients = []
    for item, x in zip((layer, plain), inputs, strict=True):
        x.requires_grad_()
        y = item(x)
        (y * torch.linspace(0, 1, y.numel(), dtype=dtype).view_as(y)).sum().backward()
        gradients.append((y.detach(), x.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])  # type: ignore[arg-type]
    assert not layer.weight.requires_grad
    assert type(model[1]) is nn.Linear


def test_only_bytes_are_saved_for_backward() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model.requires_grad_(False)
    (layer,) = convert_to_nf4(model, "0", torch.float32)
    quantize_weight(layer, "cpu")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        layer(torch.randn(4, 64, requires_grad=True))
    assert [(item.dtype, item.shape) for item in saved] == [(torch.uint8, (64, ROW_BYTES))]


def test_only_language_layers_are_loaded_as_nf4(tiny: Path) -> None:
    plain: Any = load_model(tiny, dtype=torch.float32)
    model: Any = load_model(tiny, dtype=torch.float32, quantize="nf4")
    layers = {name for name, item in model.named_modules() if isinstance(item, NF4Linear)}
    assert len(layers) == 14
    assert all(".language_model.layers." in name for name in layers)
    quantized = {f"{name}.weight" for name in layers}
    for name, parameter in model.named_parameters():
        if name in quantized:
            assert parameter.dtype == torch.uint8
            assert not parameter.requires_grad
        else:
            assert torch.equal(parameter, plain.get_parameter(name))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", True),
        ("model.language_model.layers.0.mlp.up_proj.bias", False),
        ("model.visual.blocks.0.mlp.up_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_quantized_parameter_is_recognised_by_name(name: str, found: bool) -> None:
    assert is_quantized(name, r"\.language_model\..*\.(q|k|v|o|gate|up|down)_proj$") is found


def test_flops_and_trained_share_ignore_quantization(tiny: Path) -> None:
    result = []
    for quantize in (None, "nf4"):
        model: Any = load_model(tiny, dtype=torch.float32, quantize=quantize)
        add_adapters(model, LoRAConfig(rank=4), seed=0)
        result.append((compute_model_flops(model), describe_trained_share(model)))
    assert result[0] == result[1]
