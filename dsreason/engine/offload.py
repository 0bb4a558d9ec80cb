"""Offload of the training state, which leaves the GPU while completions are sampled and returns afterwards.

DeepSpeed 0.19.8 has `offload_states` for this purpose, with several defects. At stage 3, it moves master weights and moments only
with its own FusedAdam; at stage 1 in bf16, it moves nothing; at stages 1 and 2, it breaks later calls to
`safe_get_full_optimizer_state`. It also copies gradients that are no longer needed.

This module therefore works on the tensors' storage: it copies the values that are still needed to the host, returns the tensor's
memory to the allocator, and allocates it again later. Tensors and storages remain the same objects, so all references that
DeepSpeed and the optimizer hold, including views, stay valid.
"""

from __future__ import annotations

import math

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsreason.engine.engine import get_full_shape, is_partitioned
from dsreason.engine.host_memory import HostBuffer, wait_for_copies
from dsreason.engine.rollout_memory import (
    EVERYTHING,
    OffloadAmount,
    RolloutMemory,
    count_moving,
    estimate_outside_bytes,
)
from dsreason.engine.zero3 import release_gathered
from dsreason.monitor.memory import GIB

MASTER_WEIGHTS = {
    DeepSpeedZeroOptimizer_Stage3: "fp32_partitioned_groups_flat",
    DeepSpeedZeroOptimizer: "single_partition_of_fp32_groups",  # stages 1 and 2
    BF16_Optimizer: "fp32_groups_flat_partition",  # stage 1 in bf16
}
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the AdamW state tensors that are offloaded; AdamW's step count is a scalar and stays on the GPU."""


class StateOffload:
    """Offload of this rank's master weights, moments and gradient buffers between two steps.

    Master weights and moments are kept in pinned host memory, which is allocated once and reused. Gradients are not needed
    between steps, so their buffers are restored as zeros. Calling `offload` or `reload` twice in a row has no further effect.

    Args:
        device_type: type of the device whose tensors are offloaded; nothing is offloaded from other devices. Tests set "cpu".
        amount: how much of the state to offload; by default, everything.
    """

    def __init__(self, engine: DeepSpeedEngine, device_type: str = "cuda", amount: OffloadAmount = EVERYTHING) -> None:
        self.engine = engine
        self.device_type = device_type
        self.amount = amount
        self.host: dict[str, HostBuffer] = {}
        """Tensor name → host buffer that stores the tensor."""
        self.away: dict[str, Tensor] = {}
        self.dropped: list[tuple[Tensor, int]] = []
        """(gradient buffer, size in bytes before its memory was freed) pairs."""

    @property
    def is_active(self) -> bool:
        return bool(self.engine.device.type == self.device_type)

    def offload(self) -> None:
        """Free the GPU memory occupied by the training state. Until `reload` is called, only the weights may be used."""
        if not self.is_active or self.away or self.dropped:
            return
        release_gathered(self.engine)
        moving = self.select_moving()
        dropped = self._select_on_device(self.list_gradients()) if self.amount.drop_gradients else []
        assert not get_storages(self._list_weights()) & get_storages([*moving.values(), *dropped])
        for name, tensor in moving.items():
            if name not in self.host:
                self.host[name] = HostBuffer(tensor.untyped_storage().nbytes(), pinned=tensor.is_cuda)
            self.host[name].store([get_raw_bytes(tensor)])
        self.away = moving
        self.dropped = [(tensor, tensor.untyped_storage().nbytes()) for tensor in dropped]
        wait_for_copies()  # DeepSpeed fills gradient buffers on a side stream
        for tensor in [*moving.values(), *dropped]:
            tensor.untyped_storage().resize_(0)
        if self.device_type == "cuda":
            torch.cuda.empty_cache()  # vLLM cannot allocate memory that torch has cached

    def reload(self) -> None:
        for tensor, nbytes in self.dropped:
            tensor.untyped_storage().resize_(nbytes)
            get_raw_bytes(tensor).zero_()
        for name, tensor in self.away.items():
            tensor.untyped_storage().resize_(self.host[name].nbytes)
            self.host[name].restore([get_raw_bytes(tensor)])
        self.away, self.dropped = {}, []

    def measure_sizes(self) -> dict[str, int]:
        """Return the number of bytes that can leave this rank's GPU, by kind of tensor. Moments count even before AdamW creates
        them."""
        moments, masters = self._measure_tensors()
        return {
            "master weights": sum(masters),
            "moments": sum(moments),
            "gradient buffers": count_bytes(self._select_on_device(self.list_gradients())),
        }

    def measure(self, utilization: float, bucket_bytes: int, num_ranks: int) -> RolloutMemory:
        """Measure the memory use of this rank's GPU before vLLM starts. Moments count even before AdamW creates them.

        Args:
            utilization: vLLM's share of the GPU memory, from 0 to 1.
            bucket_bytes: bytes of weights that a weight sync gathers at a time; a single weight may be larger.
        """
        release_gathered(self.engine)
        device, sizes = self.engine.device, self.measure_sizes()
        free, total = torch.cuda.mem_get_info(device)
        state = self._select_on_device([*self.list_masters(), *self.list_moments(), *self.list_gradients()])
        return RolloutMemory(
            total=total,
            vllm=math.ceil(total * utilization),
            fixed=torch.cuda.memory_allocated(device) - count_bytes(state),
            gradients=sizes["gradient buffers"],
            moments=sizes["moments"],
            masters=sizes["master weights"],
            sync=2 * max(bucket_bytes, self._find_largest_weight()),
            outside=max(estimate_outside_bytes(num_ranks), total - free - torch.cuda.memory_reserved(device)),
        )

    def describe(self) -> str:
        """Describe, for the log, which state moves to the host, which is already on the host, and which stays on the GPU."""
        if not self.is_active:
            return f"offload during rollouts: none, because training runs on {self.engine.device.type.upper()}"
        sizes = self.measure_sizes()
        gradients = sizes.pop("gradient buffers")
        moving = self._count_moving_bytes()
        moves = [f"{name} {size / GIB:.2f} GiB" for name, size in moving.items() if size]
        text = f"offload during rollouts, to pinned host memory: {', '.join(moves) or 'nothing'}"
        staying = {"weights": count_bytes(self._select_on_device(self._list_weights()))}
        staying |= {name: size - moving[name] for name, size in sizes.items()}
        if gradients and self.amount.drop_gradients:
            text += f"; freed until the next step: gradient buffers {gradients / GIB:.2f} GiB"
        else:
            staying["gradient buffers"] = gradients
        if not any(sizes.values()):
            text += "; already on the host: master weights, moments (zero_optimization.offload_optimizer)"
        stays = [f"{name} {size / GIB:.2f} GiB" for name, size in staying.items() if size]
        return f"{text}; remaining on the GPU: {', '.join(stays) or 'nothing'}"

    # ------------------------------------------------------------ tensors

    def select_moving(self) -> dict[str, Tensor]:
        """Return the tensors to copy to the host, by name; a tensor has the same name in every rollout."""
        num_moments, num_masters = self._count_moving()
        parts = {
            "moments": self._select_on_device(self.list_moments())[:num_moments],
            "master weights": self._select_on_device(self.list_masters())[:num_masters],
        }
        return {f"{name} {i}": tensor for name, part in parts.items() for i, tensor in enumerate(part)}

    def _count_moving(self) -> tuple[int, int]:
        """Return (number of moments, number of master weights) to move to the host."""
        moments, masters = self._measure_tensors()
        count = count_moving([*moments, *masters], self.amount.move_bytes)
        return min(count, len(moments)), max(0, count - len(moments))

    def _count_moving_bytes(self) -> dict[str, int]:
        (moments, masters), (num_moments, num_masters) = self._measure_tensors(), self._count_moving()
        return {"master weights": sum(masters[:num_masters]), "moments": sum(moments[:num_moments])}

    def _measure_tensors(self) -> tuple[list[int], list[int]]:
        """Return the sizes of the moments and of the master weights in bytes. Moments count even before AdamW creates them."""
        masters = [tensor.nbytes for tensor in self._select_on_device(self.list_masters())]
        return [size for size in masters for _ in MOMENTS], masters

    def list_masters(self) -> list[Tensor]:
        return list(getattr(self.engine.optimizer, MASTER_WEIGHTS[type(self.engine.optimizer)]))

    def list_moments(self) -> list[Tensor]:
        states = self.engine.optimizer.optimizer.state.values()
        return [state[name] for state in states for name in MOMENTS if name in state]

    def list_gradients(self) -> list[Tensor]:
        """Return the gradient buffers that exist between steps. At stages 1 and 2, the others are allocated anew in each step."""
        optimizer = self.engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            buckets = [bucket.buffer for bucket in optimizer.ipg_buckets.values() if bucket.buffer is not None]
            return [optimizer.grad_partitions_flat_buffer, *buckets]
        if isinstance(optimizer, BF16_Optimizer):
            return list(optimizer.fp32_groups_gradients_flat)
        return [optimizer.temp_grad_buffer_for_gpu_offload] if optimizer.cpu_offload else []

    def _list_weights(self) -> list[Tensor]:
        return [p.ds_tensor if is_partitioned(p) else p for p in self.engine.module.parameters()]

    def _find_largest_weight(self) -> int:
        parameters: list[nn.Parameter] = list(self.engine.module.parameters())
        return max(get_full_shape(parameter).numel() * parameter.element_size() for parameter in parameters)

    def _select_on_device(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self.device_type and tensor.numel()]


def get_raw_bytes(tensor: Tensor) -> Tensor:
    """Return a byte view `[bytes]` of the tensor's entire storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def get_storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def count_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
