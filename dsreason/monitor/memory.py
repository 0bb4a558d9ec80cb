"""The memory ledger, which records the duration of each phase of a step, and its final, peak and freed memory."""

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
"""For cgroup v2 and v1: pattern for the line in /proc/self/cgroup, subfolder, and (limit, usage, statistics) file names."""


@dataclass
class Total:
    """A phase's totals over the entire run."""

    times: int = 0
    seconds: float = 0.0
    gib: dict[str, float] = field(default_factory=dict)
    """Largest values so far in GiB: `{"allocated": 3.5, "peak": 4.0, "freed": 0.0}`."""


class MemoryLedger:
    """A ledger of this rank's phases, which must not be nested.

    On CUDA, `allocated` and `peak` are the memory that torch's allocator has handed out. These numbers include vLLM's tensors
    even while vLLM sleeps and their memory is unmapped, and they do not show whether freed memory was returned to the device or
    to torch's cache, which vLLM cannot use. Therefore, `freed` and `device` (the memory in use at the end of the phase) come from
    the driver and cover all processes on the device.

    On CPU, `allocated` and `freed` are anonymous resident memory, and `peak` is the peak of all resident memory, the only peak
    that the kernel records.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.values: dict[str, float] = {}
        self.totals: dict[str, Total] = {}

    @contextmanager
    def track_phase(self, name: str) -> Iterator[None]:
        """Record `memory/<name>/{seconds,allocated_gib,peak_gib,freed_gib}` for the block and, on CUDA, also `device_gib`.

        If a phase runs several times before `take`, `seconds` is the sum, `peak_gib` the maximum, and the other metrics are those
        of the last run.
        """
        wait_for_device(self.device)
        started, before = self.clock(), count_used_bytes(self.device)
        reset_peak(self.device)
        with record_phase(name):
            yield
            wait_for_device(self.device)
        seconds, after = self.clock() - started, count_used_bytes(self.device)
        values = {
            "allocated": count_allocated_bytes(self.device) / GIB,
            "peak": read_peak_bytes(self.device) / GIB,
            "freed": max(0, before - after) / GIB,
        }
        if self.device.type == "cuda":
            values["device"] = after / GIB
        self._record(name, seconds, values)

    def _record(self, name: str, seconds: float, sizes: dict[str, float]) -> None:
        prefix, values = f"memory/{name}", self.values
        highest = max(sizes["peak"], values.get(f"{prefix}/peak_gib", 0.0))
        seconds_before = values.get(f"{prefix}/seconds", 0.0)
        values |= {f"{prefix}/{kind}_gib": size for kind, size in sizes.items()}
        values |= {f"{prefix}/peak_gib": highest, f"{prefix}/seconds": seconds_before + seconds}
        total = self.totals.setdefault(name, Total())
        total.times += 1
        total.seconds += seconds
        total.gib = {kind: max(size, total.gib.get(kind, 0.0)) for kind, size in sizes.items()}

    def take(self) -> dict[str, float]:
        """Return the metrics recorded since the last call, and reset them."""
        values, self.values = self.values, {}
        return values

    def report(self) -> str:
        """Render a table for the log. Phases are in the order in which they first ran; the GiB columns show maxima."""
        table = Table("phase", title="seconds and GiB per phase")
        kinds = next(iter(self.totals.values())).gib if self.totals else ()
        for column in ("runs", "seconds", "mean", *kinds):
            table.add_column(column, justify="right")
        for name, total in self.totals.items():
            times = (str(total.times), f"{total.seconds:.1f}", f"{total.seconds / total.times:.3f}")
            table.add_row(name, *times, *(f"{size:.2f}" for size in total.gib.values()))
        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(table)
        return captured.get().rstrip()


def wait_for_device(device: torch.device) -> None:
    """Wait for work queued on the GPU, so that its time is attributed to the phase that queued it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_used_bytes(device: torch.device) -> int:
    """Return the memory in use. On CUDA, this is the driver's value, which covers all processes, torch's cache and vLLM."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return read_status_bytes("RssAnon")


def count_allocated_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return read_status_bytes("RssAnon")


def read_peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return read_status_bytes("VmHWM")


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # containers may forbid this; the peak then covers the process's lifetime
        Path("/proc/self/clear_refs").write_text("5")


def count_available_bytes(
    cgroup_root: Path = Path("/sys/fs/cgroup"), process_cgroup: Path = Path("/proc/self/cgroup")
) -> int:
    """Return the bytes of host memory that this process can still use: all of the machine's, or fewer under a cgroup's limit."""
    lines = process_cgroup.read_text() if process_cgroup.is_file() else ""
    free: list[int] = [psutil.virtual_memory().available]
    for pattern, root, names in GROUP_FILES:
        match = re.search(pattern, lines, re.MULTILINE)
        top = cgroup_root / root
        folder = top / (match.group(1) if match else "")
        inside = [group for group in (folder, *folder.parents) if group.is_relative_to(top)]
        free += [
            count_group_bytes(*(group / name for name in names)) for group in inside if (group / names[0]).is_file()
        ]
    return min(free)


def count_group_bytes(limit: Path, used: Path, stat: Path) -> int:
    """Return the number of bytes still available under a cgroup's limit; reclaimable file pages count as available."""
    allowed = limit.read_text().strip()
    if allowed == "max":
        return sys.maxsize
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat.read_text(), re.MULTILINE)
    return max(0, int(allowed) - int(used.read_text()) + (int(cached.group(1)) if cached else 0))


def read_status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no line {field}")
    return int(match.group(1)) * 1024
