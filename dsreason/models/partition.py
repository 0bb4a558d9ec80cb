"""ZeRO-3 partitions straight from memory-mapped files."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn


def partition(model: nn.Module, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Leave every rank its part of each parameter of `model`, in `dtype`; all ranks call it with the same values."""
    # DeepSpeed takes the type from its config; its own `dtype` argument turns float32 into bfloat16 on a CPU.
    configured = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    if dtype != configured:
        raise ValueError(f"load_model: dtype is {dtype}, the DeepSpeed config trains in {configured}")
    InitWithoutBroadcast(module=model, config_dict_or_path=config)


class InitWithoutBroadcast(Init):
    """`deepspeed.zero.Init` without its broadcast from rank 0: every rank has the values, mapped from the files.

    The broadcast would make each rank hold every parameter once, and write into the mapped pages.
    """

    def _zero_init_param(self, param: nn.Parameter) -> None:
        param.data = param.data.to(self.dtype)
        self._convert_to_deepspeed_param(param)
        param.partition()
