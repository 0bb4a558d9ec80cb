"""Tables for a profile: host time, GPU time and waits by phase, and the most expensive operators and kernels."""

from __future__ import annotations

import gzip
import io
import json
import math
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dsreason.monitor.console import open_console
from dsreason.phases import PREFIX

OPERATOR, PHASE = "cpu_op", "user_annotation"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
CATEGORIES = {OPERATOR, PHASE, *ON_GPU, *LAUNCHES}
WAITS = {
    *("cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpy"),
    *("cuCtxSynchronize", "cuEventSynchronize", "cuStreamSynchronize"),
}
"""CUDA calls in which the host waits for the GPU."""
ASYNC_COPY = "cudaMemcpyAsync"
"""CUDA call that waits for the GPU only if it copies from or to pageable host memory."""
NOT_PINNED = "Pageable"
"""Word in the name of a copy from or to pageable memory, such as `Memcpy DtoH (Device -> Pageable)`."""
TOP = 20
"""Maximum number of rows in the tables that list kernels or operators."""
WIDTH = 110

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An interval of host or GPU time; `start` and `end` are seconds since an arbitrary origin."""

    name: str
    category: str
    start: float
    end: float
    thread: int | str = 0
    correlation: int | None = None
    """Id that a GPU event shares with the call that launched it; None if the event has no such id."""


@dataclass
class PhaseTotals:
    """Totals for a phase, excluding its inner phases."""

    host_seconds: float = 0.0
    wait_seconds: float = 0.0
    waits: int = 0
    gpu: list[Interval] = field(default_factory=list)
    """Intervals during which the GPU ran work that this phase launched."""


class Timeline:
    """An index that finds the innermost of a thread's nested blocks at a given time."""

    def __init__(self, blocks: Iterable[TraceEvent]) -> None:
        self.segments = split_nested(blocks)
        self._starts = [start for start, _, _ in self.segments]

    def find(self, moment: float) -> str | None:
        """Return the name of the innermost block at the given time; None if it is outside all blocks."""
        index = bisect_right(self._starts, moment) - 1
        return self.segments[index][2] if index >= 0 and moment < self.segments[index][1] else None


def split_nested(blocks: Iterable[TraceEvent]) -> list[tuple[float, float, str]]:
    """Split nested blocks into consecutive segments `(start, end, name of the innermost block)`."""
    segments: list[tuple[float, float, str]] = []
    open_blocks: list[TraceEvent] = []
    position = -math.inf

    def advance(moment: float) -> None:
        nonlocal position
        if open_blocks and moment > position:
            segments.append((position, moment, open_blocks[-1].name))
        position = max(position, moment)

    for block in sorted(blocks, key=lambda block: (block.start, -block.end)):
        while open_blocks and open_blocks[-1].end <= block.start:
            advance(open_blocks[-1].end)
            open_blocks.pop()
        advance(block.start)
        open_blocks.append(block)
    while open_blocks:
        advance(open_blocks[-1].end)
        open_blocks.pop()
    return segments


def sum_union(intervals: Iterable[Interval]) -> float:
    """Return the total length of the union of the intervals; overlaps count once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def read_trace(path: Path) -> list[TraceEvent]:
    """Read the events that the tables need from a gzipped Chrome trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file, object_hook=_to_event)
    return [event for event in trace["traceEvents"] if event is not None]


def _to_event(entry: dict[str, Any]) -> Any:
    """Convert a trace's JSON objects while the trace is parsed, because millions of dictionaries would take gigabytes.

    An event's arguments, which are parsed before the event itself, are replaced with their correlation id. Events that are not
    needed are replaced with None.
    """
    if "traceEvents" in entry:
        return entry
    if "ph" not in entry:
        return entry.get("correlation")
    if entry["ph"] != "X" or entry.get("cat") not in CATEGORIES:
        return None
    start, duration = entry["ts"] / 1e6, entry["dur"] / 1e6
    name, category = sys.intern(entry["name"]), sys.intern(entry["cat"])
    return TraceEvent(name, category, start, start + duration, entry["tid"], entry.get("args"))


def render_report(events: Sequence[TraceEvent]) -> str:
    """Render the tables for one step. The longest phase is the step itself."""
    phases = [event for event in events if event.category == PHASE and event.name.startswith(PREFIX)]
    step = max(phases, key=lambda event: event.end - event.start)
    timeline = Timeline(event for event in phases if event.thread == step.thread)
    totals = sum_phases(events, timeline)
    on_gpu = [event for event in events if event.category in ON_GPU]
    seconds = step.end - step.start
    title = f"{step.name.removeprefix(PREFIX)}: {seconds:.3f} s"
    tables = [render_phases(totals, seconds, whole=step.name)]
    if on_gpu:
        title += f", {summarise_gpu(on_gpu, totals.values(), seconds)}"
        kernels = sum_by_name((event.name, event.end - event.start) for event in on_gpu)
        tables += [
            render_top("GPU kernels and copies", kernels),
            render_top("waits for the GPU, by operator", sum_waits(events)),
        ]
    tables.append(render_top("CPU operators, excluding nested operators", sum_operators(events)))
    return "\n\n".join([title, *tables])


def summarise_gpu(on_gpu: Sequence[TraceEvent], phases: Collection[PhaseTotals], step_seconds: float) -> str:
    busy = sum_union((event.start, event.end) for event in on_gpu)
    waits, wait_seconds = sum(phase.waits for phase in phases), sum(phase.wait_seconds for phase in phases)
    return (
        f"GPU busy {busy:.3f} s ({busy / step_seconds:.0%}), {waits:,} waits for the GPU ({wait_seconds:.3f} s), "
        f"{len(on_gpu):,} kernels and copies"
    )


def find_waits(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return the calls in which the host waits for the GPU."""
    waiting_copies = {
        event.correlation for event in events if event.category == "gpu_memcpy" and NOT_PINNED in event.name
    }
    return [
        event
        for event in events
        if event.category in LAUNCHES
        and (event.name in WAITS or (event.name == ASYNC_COPY and event.correlation in waiting_copies))
    ]


def sum_phases(events: Sequence[TraceEvent], timeline: Timeline) -> dict[str, PhaseTotals]:
    """Sum host time, waits and GPU time by innermost phase; GPU time is attributed to the phase that launched the work."""
    totals: dict[str, PhaseTotals] = defaultdict(PhaseTotals)
    for start, end, name in timeline.segments:
        totals[name].host_seconds += end - start
    launched: dict[int, str] = {}
    for event in events:
        phase = timeline.find(event.start) if event.category in LAUNCHES else None
        if phase is None:
            continue
        if event.correlation is not None:
            launched[event.correlation] = phase
    for wait in find_waits(events):
        if phase := timeline.find(wait.start):
            totals[phase].waits += 1
            totals[phase].wait_seconds += wait.end - wait.start
    for event in events:
        if event.category in ON_GPU and event.correlation in launched:
            totals[launched[event.correlation]].gpu.append((event.start, event.end))
    return totals


def sum_by_name(times: Iterable[tuple[str, float]]) -> list[tuple[str, float, int]]:
    """Sum the times by name, and return `(name, seconds, count)` sorted by descending time."""
    seconds: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for name, duration in times:
        seconds[name] += duration
        counts[name] += 1
    return [(name, seconds[name], counts[name]) for name in sorted(seconds, key=lambda name: -seconds[name])]


def group_operators(events: Iterable[TraceEvent]) -> dict[int | str, list[TraceEvent]]:
    threads: dict[int | str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.category == OPERATOR:
            threads[event.thread].append(event)
    return threads


def sum_waits(events: Sequence[TraceEvent]) -> list[tuple[str, float, int]]:
    """Sum the waits for each combination of a CUDA call and the operator that makes it."""
    timelines = {thread: Timeline(operators) for thread, operators in group_operators(events).items()}
    named_waits = []
    for wait in find_waits(events):
        timeline = timelines.get(wait.thread)
        operator = timeline.find(wait.start) if timeline else None
        named_waits.append((f"{wait.name} in {operator or 'Python'}", wait.end - wait.start))
    return sum_by_name(named_waits)


def sum_operators(events: Sequence[TraceEvent]) -> list[tuple[str, float, int]]:
    """Sum each operator's time and calls, excluding the time of the operators that it calls."""
    threads = group_operators(events).values()
    seconds = sum_by_name((name, end - start) for ops in threads for start, end, name in split_nested(ops))
    calls = Counter(operator.name for operators in threads for operator in operators)
    return [(name, duration, calls[name]) for name, duration, _ in seconds]


def render_phases(totals: dict[str, PhaseTotals], step_seconds: float, *, whole: str) -> str:
    """Render a table with one row per phase, in order of first occurrence. `whole` is the name of the step's outermost phase."""
    table = Table("phase", title="phases, excluding nested phases", title_justify="left")
    for column in ("host s", "share", "GPU busy s", "waits", "wait s"):
        table.add_column(column, justify="right")
    for name, phase in totals.items():
        values = (
            f"{phase.host_seconds:.3f}",
            f"{phase.host_seconds / step_seconds:.0%}",
            f"{sum_union(phase.gpu):.3f}",
        )
        label = "outside all phases" if name == whole else name.removeprefix(PREFIX)
        table.add_row(label, *values, f"{phase.waits:,}", f"{phase.wait_seconds:.3f}")
    return render(table)


def render_top(title: str, rows: Sequence[tuple[str, float, int]]) -> str:
    heading = f"{title}: {TOP} of {len(rows)}" if len(rows) > TOP else title
    table = Table(title=heading, title_justify="left")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("name")  # the only column that rich may shrink
    for name, seconds, count in rows[:TOP]:
        table.add_row(f"{seconds:.4f}", f"{count:,}", Text(name, no_wrap=True, overflow="ellipsis"))
    return render(table)


def render(table: Table) -> str:
    text = io.StringIO()
    console = open_console(file=text, highlight=False)
    console.width = WIDTH
    console.print(table)
    return text.getvalue().rstrip()
