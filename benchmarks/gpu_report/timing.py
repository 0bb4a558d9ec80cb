"""Measurement of the time and memory that work on a device takes, including its queued kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., tuple["Tensor", ...]]


def run_forward_backward(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a function forward and backward; return its outputs and the gradients of its inputs."""
    import torch

    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    # A fused backward pass may write into its incoming gradients.
    torch.autograd.backward(outputs, [output.detach().clone() for output in outputs])
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def measure_seconds(work: Callable[[], object], *, times: int = 3, warm_up: bool = True) -> float:
    """Return the mean duration of `times` calls in seconds, after a warm-up call that is not counted."""
    if warm_up:
        work()
    sync_device()
    started = time.perf_counter()
    for _ in range(times):
        work()
    sync_device()
    return (time.perf_counter() - started) / times


def sync_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_peak_gib(work: Callable[[], object]) -> float:
    """Return the peak memory, in GiB, that torch allocated during the call; 0 on a CPU."""
    import torch

    if not torch.cuda.is_available():
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() / 2**30
