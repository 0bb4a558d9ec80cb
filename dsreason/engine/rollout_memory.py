"""GPU memory during a rollout, and the training state that must be offloaded to make room for vLLM; used by runs and plans."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dsreason.config.schema_grpo import OffloadMode
from dsreason.errors import ConfigError

GIB = 2**30
CONTEXT, NCCL = GIB, GIB // 2
"""Bytes reserved on each GPU for CUDA's context and libraries, and for NCCL; the latter applies only to runs on several GPUs."""
FRAGMENTS = 0.05
"""Share of torch's memory that is lost to fragmentation. vLLM's own memory does not fragment."""


@dataclass(frozen=True)
class OffloadAmount:
    """The amount of training state that leaves the GPU during a rollout."""

    drop_gradients: bool
    """True to free the gradient buffers, which needs no copy."""
    move_bytes: int
    """Minimum number of bytes to move to the host. Tensors are moved whole, the moments before the master weights."""


EVERYTHING = OffloadAmount(True, sys.maxsize)
NOTHING = OffloadAmount(False, 0)


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Memory of one GPU during a rollout without offload, in bytes by use."""

    total: int
    """Total memory of the GPU."""
    vllm: int
    """Memory of vLLM: `rollout.gpu_memory_utilization` times the total."""
    fixed: int
    """Weights and everything else that is never offloaded, such as a teacher."""
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
    """Choose the training state that leaves the GPU, starting with the gradient buffers.

    Raises:
        ConfigError: the mode is "never", and vLLM's share does not fit next to the training state.
    """
    state, to_move = memory.moments + memory.masters, max(0, memory.excess - memory.gradients)
    if mode == "always":
        return OffloadAmount(True, state)
    if mode == "never" and to_move:
        fitting = (memory.vllm - to_move) / memory.total
        lower = f", or lower rollout.gpu_memory_utilization to {int(100 * fitting) / 100:g}" if fitting >= 0.01 else ""
        raise ConfigError(
            f'rollout.offload = "never": {memory.describe()}; even without gradient buffers '
            f"({memory.gradients / GIB:.2f} GiB), {to_move / GIB:.2f} GiB are missing; "
            f'set rollout.offload = "auto"{lower}'
        )
    return OffloadAmount(memory.excess > 0, min(to_move, state))


def count_moving(sizes: list[int], num_bytes: int) -> int:
    """Return how many tensors, counted from the first, are needed to reach `num_bytes`; all of them if the total is less.

    Args:
        sizes: bytes of each tensor.
    """
    for count in range(len(sizes)):
        if sum(sizes[:count]) >= num_bytes:
            return count
    return len(sizes)


def estimate_outside_bytes(num_gpus: int) -> int:
    """Return the number of bytes that a GPU needs outside torch's allocator."""
    return CONTEXT + (NCCL if num_gpus > 1 else 0)
