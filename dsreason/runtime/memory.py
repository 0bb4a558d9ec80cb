"""The memory ledger: what each phase of a step held at its end, held at most, and gave back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

GIB = 2**30


class MemoryLedger:
    """Measures phases of this rank.

    On CUDA: the caching allocator's allocated bytes. On CPU: anonymous resident memory at the end, and the peak of all
    resident memory (the kernel keeps no other peak).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block as `memory/<name>/{allocated,peak,freed}_gib`; a phase that runs again keeps its highest peak."""
        before = allocated_bytes(self.device)
        reset_peak(self.device)
        yield
        after, peak = allocated_bytes(self.device), peak_bytes(self.device)
        prefix = f"memory/{name}"
        self.values[f"{prefix}/allocated_gib"] = after / GIB
        self.values[f"{prefix}/peak_gib"] = max(peak / GIB, self.values.get(f"{prefix}/peak_gib", 0.0))
        self.values[f"{prefix}/freed_gib"] = max(0, before - after) / GIB

    def take(self) -> dict[str, float]:
        """The metrics since the last call."""
        values, self.values = self.values, {}
        return values


def allocated_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return status_bytes("RssAnon")


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # containers may forbid it: the peak is then that of the whole process life
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(field: str) -> int:
    """A kB line of /proc/self/status in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no line {field}")
    return int(found.group(1)) * 1024
