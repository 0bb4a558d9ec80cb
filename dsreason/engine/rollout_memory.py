"""Estimates of GPU memory during a rollout, and of the training state that must leave the GPU to make room for vLLM."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dsreason.config.schema_grpo import OffloadMode
from dsreason.errors import ConfigError

GIB = 2**30
CONTEXT, NCCL = GIB, GIB // 2
"""Bytes reserved on each GPU for CUDA's context and libraries, and for NCCL, which is needed only with several GPUs."""
FRAGMENTS = 0.05
"""Fraction of torch's memory that is lost to fragmentation. vLLM's own memory does not fragment."""


@dataclass(frozen=True)
class OffloadAmount:
    """How much training state leaves the GPU during a rollout."""

    drop_gradients: bool
    """Whether to free the gradient buffers, which need not be copied."""
    move_bytes: int
    """Minimum number of bytes to move to the host. Tensors are not split, and moments move before master weights."""


EVERYTHING = OffloadAmount(True, sys.maxsize)
NOTHING = OffloadAmount(False, 0)


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Memory use of one GPU during a rollout without offload, in bytes."""

    total: int
    """Total memory of the GPU."""
    vllm: int
    """Memory that vLLM uses: `rollout.gpu_memory_utilization` times the total."""
    fixed: int
    """Memory of the weights, and of anything else that is never offloaded, such as a teacher."""
    gradients: int
    moments: int
    masters: int
    sync: int
    """Maximum memory for the full weights that a weight sync gathers at a time."""
    outside: int
    """Memory of the CUDA context, NCCL and other processes."""

    @property
    def training(self) -> int:
        return self.fixed + self.gradients + self.moments + self.masters

    @property
    def margin(self) -> int:
        return self.outside + self.sync + int(FRAGMENTS * self.training)

    @property
    def needed(self) -> int:
        return self.vllm + self.training + self.margin

    @property
    def excess(self) -> int:
        """Bytes that must leave the GPU; 0 if everything fits."""
        return max(0, self.needed - self.total)

    def describe(self) -> str:
        return (
            f"vLLM {self.vllm / GIB:.2f} + training {self.training / GIB:.2f} + margin {self.margin / GIB:.2f} "
            f"= {self.needed / GIB:.2f} GiB of the GPU's {self.total / GIB:.2f} GiB"
        )


def choose_amount(mode: OffloadMode, memory: RolloutMemory) -> OffloadAmount:
    """Choose how much training state leaves the GPU: first the gradient buffers, then as much as is still needed.

    Raises:
        ConfigError: the mode is "never", and the GPU does not have enough memory for both vLLM and the training state.
    """
    state, to_move = memory.moments + memory.masters, max(0, memory.excess - memory.gradients)
    if mode == "always":
        return OffloadAmount(True, state)
    if mode == "never" and to_move:
        fitting = (memory.vllm - to_move) / memory.total
        lower = f", or lower rollout.gpu_memory_utilization to {int(100 * fitting) / 100:g}" if fitting >= 0.01 else ""
        raise ConfigError(
            f'rollout.offload = "never": {memory.describe()}; even if the gradient buffers '
            f"({memory.gradients / GIB:.2f} GiB) are freed, {to_move / GIB:.2f} GiB are missing; "
            f'set rollout.offload = "auto"{lower}'
        )
    return OffloadAmount(memory.excess > 0, min(to_move, state))


def count_moving(sizes: list[int], num_bytes: int) -> int:
    """Return how many of the first tensors together have at least `num_bytes` bytes; if their total is less, return all.

    Args:
        sizes: size of each tensor in bytes.
    """
    for count in range(len(sizes)):
        if sum(sizes[:count]) >= num_bytes:
            return count
    return len(sizes)


def estimate_outside_bytes(num_gpus: int) -> int:
    """Estimate the number of bytes of GPU memory used outside torch's allocator."""
    return CONTEXT + (NCCL if num_gpus > 1 else 0)
