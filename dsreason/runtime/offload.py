"""What only training needs leaves the GPU while completions are sampled, and comes back as it was.

What DeepSpeed 0.19.8 has for this, `offload_states`, moves the gradient buffers of stage 3, and that is left to it. Master
weights and moments it moves at stage 3 for its own FusedAdam alone, at stage 1 in bf16 not at all, and at stages 1 and 2
`safe_get_full_optimizer_state` fails ever after. So for torch's AdamW they are moved here, and underneath: a tensor's
memory is copied to the host and given back to the allocator, and later it gets memory again and the same bits. Tensors
and storages stay the same objects, so all that DeepSpeed and the optimizer keep of them, views included, stays right.
"""

from __future__ import annotations

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from dsreason.runtime.engine import is_partitioned
from dsreason.runtime.memory import GIB

MASTER_WEIGHTS = {
    DeepSpeedZeroOptimizer_Stage3: "fp32_partitioned_groups_flat",
    DeepSpeedZeroOptimizer: "single_partition_of_fp32_groups",  # stages 1 and 2
    BF16_Optimizer: "fp32_groups_flat_partition",  # stage 1 in bf16
}
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's step count is a scalar and stays."""
GRADIENTS = (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer)
PIECE = 2**26
"""Bytes of one host buffer. torch rounds pinned memory up to a power of two: one buffer for all could take twice its size."""


class StateOffload:
    """Moves this rank's master weights, moments and gradient buffers to pinned host memory and back, between two steps.

    The host memory is allocated once and kept. Both methods may be called twice in a row. An engine on a CPU keeps
    everything where it is; tests ask for its tensors to be moved with `device_type="cpu"`.
    """

    def __init__(self, engine: DeepSpeedEngine, device_type: str = "cuda") -> None:
        self.engine = engine
        self.device_type = device_type
        self.host: dict[str, list[Tensor]] = {}
        """Pieces of host memory, by the name of the tensor whose bits they take."""
        self.away: dict[str, Tensor] = {}

    @property
    def is_active(self) -> bool:
        return self.engine.device.type == self.device_type

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed moves the gradient buffers.

        It refuses where parameters are offloaded; where the optimizer is, they are on the host, and `reload_states` would
        put them on the GPU for good.
        """
        offloads = (self.engine.zero_offload_param(), self.engine.zero_offload_optimizer())
        kept = all(offload is None or offload.device == OffloadDeviceEnum.none for offload in offloads)
        return self.engine.zero_optimization_stage() == 3 and kept

    def offload(self) -> None:
        """Afterwards the tensors have no memory at all: only weights may be read until `reload`."""
        if not self.is_active or self.away:
            return
        if self.by_deepspeed:
            self.engine.offload_states(include=GRADIENTS)
        moving = self.moving()
        for name, tensor in moving.items():
            if name not in self.host:
                self.host[name] = host_memory(tensor.untyped_storage().nbytes(), pinned=tensor.is_cuda)
            for piece, part in zip(self.host[name], raw_bytes(tensor).split(PIECE), strict=True):
                piece.copy_(part, non_blocking=True)
        self._synchronize()  # the copies must be whole before what they read is freed
        for tensor in moving.values():
            tensor.untyped_storage().resize_(0)
        self.away = moving
        if self.device_type == "cuda":
            torch.cuda.empty_cache()  # vLLM allocates past torch's cache

    def reload(self) -> None:
        if not self.is_active:
            return
        for name, tensor in self.away.items():
            tensor.untyped_storage().resize_(sum(piece.nbytes for piece in self.host[name]))
            for piece, part in zip(self.host[name], raw_bytes(tensor).split(PIECE), strict=True):
                part.copy_(piece, non_blocking=True)
        self._synchronize()
        self.away = {}
        if self.by_deepspeed:
            self.engine.reload_states()

    def sizes(self) -> dict[str, int]:
        """Bytes of this rank that leave the GPU from the second rollout on; AdamW makes its moments in the first step."""
        masters = count_bytes(self._on_device(self.masters()))
        return {
            "master weights": masters,
            "moments": len(MOMENTS) * masters,
            "gradient buffers": count_bytes(self._on_device(self.gradients())),
        }

    def describe(self) -> str:
        """One line for the log: what moves, what is on the host anyway, and what stays."""
        if not self.is_active:
            return f"offload during rollouts: nothing, training runs on {self.engine.device.type.upper()}"
        sizes = self.sizes()
        moves = [f"{name} {size / GIB:.2f} GiB" for name, size in sizes.items() if size]
        text = f"offload during rollouts, to pinned host memory: {', '.join(moves) or 'nothing'}"
        if not sizes["master weights"]:
            text += "; not on the GPU anyway: master weights, moments (zero_optimization.offload_optimizer)"
        weights = count_bytes(self._on_device(self._weights()))
        return text + f"; stays on the GPU: weights {weights / GIB:.2f} GiB, which the sampler's are copied from"

    # ------------------------------------------------------------ what there is

    def moving(self) -> dict[str, Tensor]:
        """What DeepSpeed leaves to us, by names that stay the same from rollout to rollout."""
        parts = {
            "master weights": self.masters(),
            "moments": self.moments(),
            "gradient buffers": [] if self.by_deepspeed else self.gradients(),
        }
        moving = {
            f"{name} {i}": tensor for name, part in parts.items() for i, tensor in enumerate(self._on_device(part))
        }
        resident = {tensor.untyped_storage().data_ptr() for tensor in self._weights()}
        assert not resident & {tensor.untyped_storage().data_ptr() for tensor in moving.values()}
        return moving

    def masters(self) -> list[Tensor]:
        return list(getattr(self.engine.optimizer, MASTER_WEIGHTS[type(self.engine.optimizer)]))

    def moments(self) -> list[Tensor]:
        states = self.engine.optimizer.optimizer.state.values()
        return [state[name] for state in states for name in MOMENTS if name in state]

    def gradients(self) -> list[Tensor]:
        """Buffers that outlive a step. At stages 1 and 2 DeepSpeed otherwise makes them anew in each one."""
        optimizer = self.engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            buckets = [bucket.buffer for bucket in optimizer.ipg_buckets.values() if bucket.buffer is not None]
            return [optimizer.grad_partitions_flat_buffer, *buckets]
        if isinstance(optimizer, BF16_Optimizer):
            return list(optimizer.fp32_groups_gradients_flat)
        return [optimizer.temp_grad_buffer_for_gpu_offload] if optimizer.cpu_offload else []

    def _weights(self) -> list[Tensor]:
        return [p.ds_tensor if is_partitioned(p) else p for p in self.engine.module.parameters()]

    def _on_device(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self.device_type and tensor.numel()]

    def _synchronize(self) -> None:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)


def host_memory(nbytes: int, *, pinned: bool) -> list[Tensor]:
    sizes = [min(PIECE, nbytes - start) for start in range(0, nbytes, PIECE)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]


def raw_bytes(tensor: Tensor) -> Tensor:
    """The whole memory behind a tensor, `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def count_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
