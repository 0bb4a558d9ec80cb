"""ZeRO-3 partitions straight from memory-mapped files."""

from __future__ import annotations

from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn


class PartitionOwnPart(Init):
    """`deepspeed.zero.Init` without its broadcast from rank 0: every rank has the values, mapped from the files.

    The broadcast would make each rank hold every parameter once, and write into the mapped pages.
    """

    def _zero_init_param(self, param: nn.Parameter) -> None:
        param.data = param.data.to(self.dtype)
        self._convert_to_deepspeed_param(param)
        param.partition()
