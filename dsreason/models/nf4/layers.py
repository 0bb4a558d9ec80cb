"""Linear layers that store their weights in 4 bits, but otherwise behave like any other linear layer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from dsreason.errors import ConfigError
from dsreason.families import Family
from dsreason.models.nf4.blocks import dequantize, quantize


class NF4Linear(nn.Linear):
    """Linear layer whose frozen `weight` contains the `[blocks, 36]` bytes from `quantize`; products are computed in `dtype`.

    `convert_to_nf4` turns an `nn.Linear` into this class by changing its type; the loading code sets the weight.
    """

    dtype: torch.dtype

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = NF4Product.apply(input, self.weight, self.bias, self.shape, self.dtype)  # type: ignore[no-untyped-call]
        return product

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    def whole(self) -> Tensor:
        """Return the dequantised weight `[out, in]` in `dtype`. Under ZeRO-3, gather the bytes before calling this method."""
        return dequantize(self.weight.detach(), self.shape, self.dtype)


class NF4Product(torch.autograd.Function):
    """Product with a frozen 4-bit weight that saves only the weight's bytes for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, rows: Tensor, bias: Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.dtype = shape, dtype
        return nn.functional.linear(input, dequantize(rows, shape, dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return gradient @ dequantize(rows, ctx.shape, ctx.dtype), None, None, None, None


def convert_to_nf4(model: nn.Module, pattern: str, dtype: torch.dtype) -> list[NF4Linear]:
    """Make the linear layers whose names match `pattern` compute in `dtype` with 4-bit weights, and return these layers.

    The weights remain unquantised or empty until `quantize_weight` is called.
    """
    layers: list[Any] = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and is_quantized(f"{name}.weight", pattern)
    ]
    for layer in layers:
        layer.__class__, layer.dtype = NF4Linear, dtype
    return layers


def check_experts(family: Family) -> None:
    """Raise ConfigError for a mixture of experts: its experts, which are nearly all of its weights, are not linear layers."""
    if family.modules.experts:
        raise ConfigError(
            f'model.quantize = "nf4" would leave the experts of {family.name}, and with them nearly all weights, unquantised; '
            "unset model.quantize"
        )


def is_quantized(parameter: str, pattern: str) -> bool:
    """Return whether the name belongs to the weight of a layer that `pattern` matches."""
    return parameter.endswith(".weight") and re.search(pattern, parameter.removesuffix(".weight")) is not None


def quantize_weight(layer: NF4Linear, device: torch.device | str) -> None:
    """Replace the unquantised weight of a layer with its 4-bit blocks on `device`."""
    layer.weight.requires_grad_(False)
    layer.weight.data = quantize(layer.weight.data).to(device)
