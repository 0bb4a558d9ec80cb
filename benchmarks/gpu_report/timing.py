"""Seconds of work on a device, queued kernels included."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(work: Callable[[], object], *, times: int = 3, warm_up: bool = True) -> float:
    """Mean of `times` calls, after one more that is not counted."""
    if warm_up:
        work()
    synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return (time.perf_counter() - started) / times


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib(work: Callable[[], object]) -> float:
    """Most that torch has handed out at a time while it ran; 0 on a CPU."""
    import torch

    if not torch.cuda.is_available():
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30
