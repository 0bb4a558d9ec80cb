"""The memory ledger: how long each phase of a step took, what it held at its end, held at most, and gave back."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from dsreason.phases import record_phase

GIB = 2**30
GROUP_FILES = (
    (r"^0::/(.*)$", "", ("memory.max", "memory.current", "memory.stat")),
    (r"^\d+:memory:/(.*)$", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")),
)
"""Of control groups, versions 2 and 1: the line of /proc/self/cgroup, where they are mounted, their limit and use."""


@dataclass
class Total:
    """A phase over the whole run."""

    times: int = 0
    seconds: float = 0.0
    gib: dict[str, float] = field(default_factory=dict)
    """The most of any time: `{"allocated": 3.5, "peak": 4.0, "freed": 0.0}`."""


class MemoryLedger:
    """Measures phases of this rank; they do not nest.

    On CUDA `allocated` and `peak` are what torch's allocator has handed out. That count does not move when vLLM, whose
    tensors it holds too, unmaps the memory behind them to sleep, nor does it tell whether freed memory went back to the
    device or to torch's cache, out of vLLM's reach. So `device`, in use at the end of the phase, and `freed` are the
    driver's count, which is of all processes on the device. On CPU `allocated` and `freed` are anonymous resident
    memory, and `peak` is that of all resident memory (the kernel keeps no other peak).
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.values: dict[str, float] = {}
        self.totals: dict[str, Total] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block as `memory/<name>/{seconds,allocated_gib,peak_gib,freed_gib}`, on CUDA `device_gib` too.

        Of a phase that runs again before `take`, the seconds add up, and the peak is the highest.
        """
        synchronize(self.device)
        started, before = self.clock(), used_bytes(self.device)
        reset_peak(self.device)
        with record_phase(name):
            yield
            synchronize(self.device)
        seconds, after = self.clock() - started, used_bytes(self.device)
        values = {
            "allocated": allocated_bytes(self.device) / GIB,
            "peak": peak_bytes(self.device) / GIB,
            "freed": max(0, before - after) / GIB,
        }
        if self.device.type == "cuda":
            values["device"] = after / GIB
        self._note(name, seconds, values)

    def _note(self, name: str, seconds: float, found: dict[str, float]) -> None:
        prefix, values = f"memory/{name}", self.values
        highest = max(found["peak"], values.get(f"{prefix}/peak_gib", 0.0))
        seconds_before = values.get(f"{prefix}/seconds", 0.0)
        values |= {f"{prefix}/{kind}_gib": size for kind, size in found.items()}
        values |= {f"{prefix}/peak_gib": highest, f"{prefix}/seconds": seconds_before + seconds}
        total = self.totals.setdefault(name, Total())
        total.times += 1
        total.seconds += seconds
        total.gib = {kind: max(size, total.gib.get(kind, 0.0)) for kind, size in found.items()}

    def take(self) -> dict[str, float]:
        """The metrics since the last call."""
        values, self.values = self.values, {}
        return values

    def report(self) -> str:
        """A table for a log: every phase in the order of their first time; each column of GiB has the most of any time."""
        table = Table("phase", title="seconds and GiB of each phase")
        kinds = next(iter(self.totals.values())).gib if self.totals else ()
        for column in ("times", "seconds", "mean", *kinds):
            table.add_column(column, justify="right")
        for name, total in self.totals.items():
            times = (str(total.times), f"{total.seconds:.1f}", f"{total.seconds / total.times:.3f}")
            table.add_row(name, *times, *(f"{size:.2f}" for size in total.gib.values()))
        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(table)
        return captured.get().rstrip()


def synchronize(device: torch.device) -> None:
    """Wait for what the phase before, or this one, has only queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used_bytes(device: torch.device) -> int:
    """On CUDA the driver's count: all processes, memory that torch caches or that vLLM maps included."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return status_bytes("RssAnon")


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


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Host memory that is still available: what the machine has free, or less where a control group has a limit."""
    lines = own.read_text() if own.is_file() else ""
    free: list[int] = [psutil.virtual_memory().available]
    for pattern, root, names in GROUP_FILES:
        match = re.search(pattern, lines, re.MULTILINE)
        top = groups / root
        folder = top / (match.group(1) if match else "")
        inside = [group for group in (folder, *folder.parents) if group.is_relative_to(top)]
        free += [group_bytes(*(group / name for name in names)) for group in inside if (group / names[0]).is_file()]
    return min(free)


def group_bytes(limit: Path, used: Path, stat: Path) -> int:
    """Return what a control group's limit leaves; file pages that the kernel gives back when asked count as free."""
    allowed = limit.read_text().strip()
    if allowed == "max":
        return sys.maxsize
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat.read_text(), re.MULTILINE)
    return max(0, int(allowed) - int(used.read_text()) + (int(cached.group(1)) if cached else 0))


def status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no line {field}")
    return int(match.group(1)) * 1024
