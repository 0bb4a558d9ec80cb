"""Code that creates ZeRO-3 partitions directly from memory-mapped files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init, is_zero_param
from torch import Tensor, nn

from dsreason.models.nf4.blocks import ROW_BYTES, count_blocks, quantize
from dsreason.models.nf4.layers import NF4Linear


def partition_model(
    model: nn.Module, dtype: torch.dtype, config: dict[str, Any], quantized: Sequence[NF4Linear] = ()
) -> None:
    """Partition each parameter of `model` across the ranks, in `dtype`; every rank must pass the same parameter values.

    The weights of the `quantized` layers must be complete. The function converts them to 4-bit blocks; each rank computes only
    the blocks that it keeps.
    """
    # DeepSpeed takes the dtype from its config, because the `dtype` argument of `Init` turns float32 into bfloat16 on a CPU.
    config_dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    if dtype != config_dtype:
        raise ValueError(
            f"load_model: dtype is {dtype}, but the DeepSpeed config sets {config_dtype}; pass the same dtype"
        )
    InitWithoutBroadcast(model, config, frozenset(id(layer.weight) for layer in quantized))


class InitWithoutBroadcast(Init):
    """Variant of `deepspeed.zero.Init` without the broadcast from rank 0, which is unnecessary because all ranks map the files.

    For the broadcast, each rank would have to load every parameter completely and write to the mapped pages. This class copies
    only the part that this rank keeps to the GPU.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], quantized: frozenset[int]) -> None:
        self.quantized = quantized
        """`id()` of each parameter that becomes 4-bit blocks."""
        super().__init__(module=model, config_dict_or_path=config)

    def _convert_to_zero_parameters(self, param_list: Iterable[Any]) -> None:
        for param in param_list:
            if not is_zero_param(param):
                if id(param) in self.quantized:
                    param.requires_grad_(False)
                    param.data = self._quantize(param.data)
                else:
                    param.data = self._convert(param.data)
                self._convert_to_deepspeed_param(param)
                param.partition()
                param.data = param.data.to(self.local_device)  # empty now, but later gathered on the same device

    def _convert(self, values: Tensor) -> Tensor:
        """Convert this rank's part of `values` to the training dtype; the rest of a converted tensor is undefined.

        Pages that are never written take no memory, so a rank needs memory only for its part, even if the tensor is large.
        """
        if self.num_param_groups > 1:  # hpZ creates a secondary partition, which needs all values
            return values.to(self.dtype).contiguous()
        if values.dtype == self.dtype and values.is_contiguous():
            return values
        size = math.ceil(values.numel() / self.dp_world_size)
        converted = torch.empty(values.shape, dtype=self.dtype, device=values.device)
        width = converted[:1].numel()
        rows = slice(self.rank * size // width, math.ceil((self.rank + 1) * size / width))
        converted[rows] = values[rows]
        return converted

    def _quantize(self, values: Tensor) -> Tensor:
        """Quantise this rank's blocks of `values`; as in `_convert`, the rest of the returned tensor is undefined."""
        if self.num_param_groups > 1:
            return quantize(values)
        blocks = count_blocks(values.shape)
        size = math.ceil(blocks * ROW_BYTES / self.dp_world_size)
        first, end = self.rank * size // ROW_BYTES, math.ceil((self.rank + 1) * size / ROW_BYTES)
        return quantize(values, range(min(first, blocks), min(end, blocks)))
