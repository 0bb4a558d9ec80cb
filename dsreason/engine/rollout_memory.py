"""The GPU memory of a rollout, and the training state that must make room for vLLM. Runs and plans both use this module."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dsreason.config.schema_grpo import OffloadMode
from dsreason.errors import ConfigError

GIB = 2**30
CONTEXT, NCCL = GIB, GIB // 2
"""Bytes allowed on a GPU for CUDA's context and libraries, and for communication between several GPUs."""
FRAGMENTS = 0.05
"""Share of torch's memory that its allocator cannot use. vLLM's own memory has no such loss."""


@dataclass(frozen=True)
class OffloadAmount:
    """The training state that leaves the GPU during a rollout."""

    drop_gradients: bool
    """Free the gradient buffers, which costs no copy."""
    move_bytes: int
    """Copy at least this much to the host: moments first, then master weights, in whole tensors."""


EVERYTHING = OffloadAmount(True, sys.maxsize)
NOTHING = OffloadAmount(False, 0)


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Bytes on one GPU during a rollout if no training state moves."""

    total: int
    """Memory of the GPU."""
    vllm: int
    """vLLM's share, `rollout.gpu_memory_utilization` of the total."""
    fixed: int
    """Weights, and everything else that stays in every mode, such as a teacher."""
    gradients: int
    moments: int
    masters: int
    sync: int
    """Whole weights that a weight sync gathers at a time."""
    outside: int
    """CUDA context, NCCL and other processes."""

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
        """Bytes that have to leave the GPU."""
        return max(0, self.needed - self.total)

    def describe(self) -> str:
        return (
            f"vLLM {self.vllm / GIB:.2f} + training {self.training / GIB:.2f} + margin {self.margin / GIB:.2f} "
            f"= {self.needed / GIB:.2f} GiB, the GPU has {self.total / GIB:.2f}"
        )


def choose_amount(mode: OffloadMode, memory: RolloutMemory) -> OffloadAmount:
    """Choose what leaves the GPU. Gradient buffers go first.

    Raises:
        ConfigError: the mode is "never" and vLLM's share does not fit beside the training state.
    """
    state, to_move = memory.moments + memory.masters, max(0, memory.excess - memory.gradients)
    if mode == "always":
        return OffloadAmount(True, state)
    if mode == "never" and to_move:
        fitting = (memory.vllm - to_move) / memory.total
        lower = f", or lower rollout.gpu_memory_utilization to {int(100 * fitting) / 100:g}" if fitting >= 0.01 else ""
        raise ConfigError(
            f'rollout.offload = "never": {memory.describe()}; without gradient buffers '
            f"({memory.gradients / GIB:.2f} GiB) {to_move / GIB:.2f} GiB are still missing; "
            f'set rollout.offload = "auto"{lower}'
        )
    return OffloadAmount(memory.excess > 0, min(to_move, state))


def count_moving(sizes: list[int], num_bytes: int) -> int:
    """Return the number of leading tensors that together hold at least `num_bytes`; all if they hold less."""
    for count in range(len(sizes)):
        if sum(sizes[:count]) >= num_bytes:
            return count
    return len(sizes)


def allow_outside(num_gpus: int) -> int:
    """Return the allowance for memory outside torch's allocator."""
    return CONTEXT + (NCCL if num_gpus > 1 else 0)
