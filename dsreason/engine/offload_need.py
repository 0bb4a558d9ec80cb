"""How much training state has to leave a GPU while completions are sampled: arithmetic that `dsreason plan` shares."""

from __future__ import annotations

from typing import Literal

Offload = Literal["auto", "always", "never"]

GIB = 2**30


def sampling_margin(total: int) -> int:
    """Bytes kept free on a GPU of `total` bytes: CUDA's context, compiled graphs, buckets of the weight sync, fragments."""
    return 4 * GIB + total // 20


def bytes_to_free(mode: Offload, *, total: int, sampler: int, held: int) -> int | None:
    """Return the bytes that have to leave; None: everything that can.

    Args:
        total: of the GPU.
        sampler: that vLLM uses while it is awake, `rollout.gpu_memory_utilization` of `total`.
        held: of weights, master weights, moments and gradient buffers together.

    Raises:
        ValueError: `mode` is "never", and not everything fits side by side.
    """
    if mode == "always":
        return None
    missing = held + sampler + sampling_margin(total) - total
    if mode == "never" and missing > 0:
        raise ValueError(
            f'rollout.offload = "never": training state ({held / GIB:.1f} GiB), vLLM\'s share ({sampler / GIB:.1f} GiB, '
            f"rollout.gpu_memory_utilization) and a margin of {sampling_margin(total) / GIB:.1f} GiB do not fit on a GPU of "
            f'{total / GIB:.1f} GiB; set "auto", or lower rollout.gpu_memory_utilization'
        )
    return max(0, missing)
