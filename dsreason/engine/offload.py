"""What only training needs leaves the GPU while completions are sampled, and comes back as it was.

What DeepSpeed 0.19.8 has for this, `offload_states`, moves master weights and moments at stage 3 for its own FusedAdam
alone, at stage 1 in bf16 not at all, and at stages 1 and 2 `safe_get_full_optimizer_state` fails ever after; gradients it
copies, though nobody reads them again. So all is moved here, and underneath: a tensor's memory is given back to the
allocator (a copy of what is needed kept on the host), and later it gets memory again. Tensors and storages stay the same
objects, so all that DeepSpeed and the optimizer keep of them, views included, stays right.
"""

from __future__ import annotations

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from dsreason.engine.engine import is_partitioned
from dsreason.engine.host_memory import HostBuffer, synchronize
from dsreason.engine.zero3 import release_gathered
from dsreason.monitor.memory import GIB

MASTER_WEIGHTS = {
    DeepSpeedZeroOptimizer_Stage3: "fp32_partitioned_groups_flat",
    DeepSpeedZeroOptimizer: "single_partition_of_fp32_groups",  # stages 1 and 2
    BF16_Optimizer: "fp32_groups_flat_partition",  # stage 1 in bf16
}
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's step count is a scalar and stays."""


class StateOffload:
    """Takes this rank's master weights, moments and gradient buffers off the GPU and brings them back, between two steps.

    Weights and moments wait in pinned host memory, which is allocated once and kept. Of gradients nothing is needed
    between steps: they come back as zeros. Both methods may be called twice in a row. An engine on a CPU keeps everything
    where it is; tests ask for its tensors to be moved with `device_type="cpu"`.

    Args:
        need: bytes that have to leave, see `bytes_to_free`; None: all. Gradient buffers go first, which costs no copy, then
            moments, then master weights, each as a whole.
    """

    def __init__(self, engine: DeepSpeedEngine, device_type: str = "cuda", need: int | None = None) -> None:
        self.engine = engine
        self.device_type = device_type
        self.need = need
        self.host: dict[str, HostBuffer] = {}
        """By the name of the tensor whose bytes it takes."""
        self.away: dict[str, Tensor] = {}
        self.dropped: list[tuple[Tensor, int]] = []
        """Gradient buffers that have no memory now, and the bytes that they had."""

    @property
    def is_active(self) -> bool:
        return bool(self.engine.device.type == self.device_type)

    def offload(self) -> None:
        """Afterwards the tensors have no memory at all: only weights may be read until `reload`."""
        if not self.is_active or self.away or self.dropped:
            return
        release_gathered(self.engine)
        moving, dropped = self.chosen()
        assert not storages(self._weights()) & storages([*moving.values(), *dropped])
        for name, tensor in moving.items():
            if name not in self.host:
                self.host[name] = HostBuffer(tensor.untyped_storage().nbytes(), pinned=tensor.is_cuda)
            self.host[name].store([raw_bytes(tensor)])
        self.away = moving
        self.dropped = [(tensor, tensor.untyped_storage().nbytes()) for tensor in dropped]
        synchronize()  # DeepSpeed fills gradient buffers beside the main stream
        for tensor in [*moving.values(), *dropped]:
            tensor.untyped_storage().resize_(0)
        if self.device_type == "cuda":
            torch.cuda.empty_cache()  # vLLM allocates past torch's cache

    def reload(self) -> None:
        for tensor, nbytes in self.dropped:
            tensor.untyped_storage().resize_(nbytes)
            raw_bytes(tensor).zero_()
        for name, tensor in self.away.items():
            tensor.untyped_storage().resize_(self.host[name].nbytes)
            self.host[name].restore([raw_bytes(tensor)])
        self.away, self.dropped = {}, []

    def chosen(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return what waits on the host, and which gradient buffers are dropped: as much as is needed now."""
        moving, gradients = self.moving(), self._on_device(self.gradients())
        if self.need is None:
            return moving, gradients
        freed = self.absent()
        dropped: list[Tensor] = []
        for tensor in gradients:
            if freed < self.need:
                dropped.append(tensor)
                freed += tensor.nbytes
        moved: dict[str, Tensor] = {}
        for name, tensor in sorted(moving.items(), reverse=True):  # moments before master weights
            if freed < self.need:
                moved[name] = tensor
                freed += tensor.nbytes
        return moved, dropped

    def absent(self) -> int:
        """Bytes of the moments that the first step makes."""
        return self.sizes()["moments"] - count_bytes(self._on_device(self.moments()))

    def held(self) -> int:
        """Bytes of weights and training state on the device, once the moments exist."""
        return sum(self.sizes().values()) + count_bytes(self._on_device(self._weights()))

    def sizes(self) -> dict[str, int]:
        """Bytes of this rank that the GPU has free from the second rollout on; AdamW makes its moments in the first step."""
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
        if self.need == 0:
            return f"offload during rollouts: nothing, {self.held() / GIB:.2f} GiB of training state fit beside vLLM's share"
        if self.need is not None:
            return (
                f"offload during rollouts: {self.need / GIB:.2f} of {self.held() / GIB:.2f} GiB of training state make room "
                "for vLLM's share: gradient buffers first, then moments, then master weights, to pinned host memory"
            )
        sizes = self.sizes()
        gradients = sizes.pop("gradient buffers")
        moves = [f"{name} {size / GIB:.2f} GiB" for name, size in sizes.items() if size]
        text = f"offload during rollouts, to pinned host memory: {', '.join(moves) or 'nothing'}"
        if gradients:
            text += f"; given back until the next step: gradient buffers {gradients / GIB:.2f} GiB"
        if not moves:
            text += "; not on the GPU anyway: master weights, moments (zero_optimization.offload_optimizer)"
        weights = count_bytes(self._on_device(self._weights()))
        return text + f"; stays on the GPU: weights {weights / GIB:.2f} GiB, which the sampler's are copied from"

    # ------------------------------------------------------------ what there is

    def moving(self) -> dict[str, Tensor]:
        """What waits on the host, by names that stay the same from rollout to rollout."""
        parts = {"master weights": self.masters(), "moments": self.moments()}
        return {f"{name} {i}": tensor for name, part in parts.items() for i, tensor in enumerate(self._on_device(part))}

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


def raw_bytes(tensor: Tensor) -> Tensor:
    """The whole memory behind a tensor, `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def count_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
