"""Progress displays for a run or other work: a bar on a terminal, and periodic plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Self, TextIO

from rich import progress as bars
from rich.filesize import decimal
from rich.table import Column
from rich.text import Text

from dsreason.monitor.console import open_console
from dsreason.screen import escape_control, format_message, print_message, to_one_line, write

Advance = Callable[[int], None]
"""Type of the function to call with the number of units just completed."""


PART = "DSREASON_PART"
"""Environment variable through which a command that consists of several runs passes a `CommandPart` to each run."""


@dataclass(frozen=True)
class CommandPart:
    """A run's position in a longer command that consists of several runs.

    For example, `1/4 2.5` in the environment stands for the first of four parts; if its steps take 10 seconds, everything after
    them is expected to take 25 seconds.
    """

    number: int
    count: int
    after: float
    """Expected duration of everything that follows the steps, as a multiple of the steps' own duration."""

    def __str__(self) -> str:
        return f"{self.number}/{self.count} {self.after:.3f}"


def read_part() -> CommandPart | None:
    if PART not in os.environ:
        return None
    fraction, after = os.environ[PART].split()
    number, count = fraction.split("/")
    return CommandPart(int(number), int(count), float(after))


class Progress(AbstractContextManager["Progress"]):
    """The training loop's progress display. This base class, which ranks above 0 use, shows nothing."""

    def step(self, step: int, shown: Mapping[str, float], *, samples: int, tokens: int) -> None: ...

    @contextmanager
    def track_phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Advance]:
        yield lambda count: None

    def print_line(self, text: str) -> None: ...
    def close(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_progress(*, rank: int, total_steps: int, first_step: int = 0, stream: TextIO | None = None) -> Progress:
    """Return a progress display on rank 0, and a display that shows nothing on other ranks.

    The display is a bar if `stream` (by default stdout) is a terminal. Otherwise, plain lines are printed for the first step, for
    the last step, and every 10 seconds. `first_step` is the step from which the run resumes.
    """
    if rank != 0:
        return Progress()
    stream = sys.stdout if stream is None else stream
    rate = Rate(total_steps, first_step, part=read_part())
    return BarProgress(rate, stream) if stream.isatty() else LineProgress(rate, stream)


class Rate:
    """The speed of recent steps, excluding phases such as validation."""

    memory = 0.9  # weight of the past in the running means

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        clock: Callable[[], float] = time.monotonic,
        part: CommandPart | None = None,
    ) -> None:
        self.total_steps, self.step, self.clock, self.part = total_steps, first_step, clock, part
        self.started = clock()
        self.seconds = self.samples = self.tokens = 0.0  # running means per step
        self.seen = 0

    def update(self, step: int, samples: int, tokens: int) -> None:
        now = self.clock()
        # The first step includes warm-up, so it counts only until the second step has been measured.
        keep = min(self.memory, max(0, self.seen - 1) / max(1, self.seen))
        self.seconds = keep * self.seconds + (1 - keep) * (now - self.started)
        self.samples = keep * self.samples + (1 - keep) * samples
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.step, self.started, self.seen = step, now, self.seen + 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        begin = self.clock()
        yield
        self.started += self.clock() - begin

    def format_title(self, name: str) -> str:
        """Prefix the name with the part of the command, if it has several: `2/4 step`."""
        name = to_one_line(name)
        return name if self.part is None else f"{self.part.number}/{self.part.count} {name}"

    def format_facts(self, shown: Mapping[str, float]) -> str:
        """Format metrics and speed as `loss 1.2345  31.5 samples/s  12,345 tokens/s`."""
        seconds = max(self.seconds, 1e-9)
        speed = f"{self.samples / seconds:.1f} samples/s  {self.tokens / seconds:,.0f} tokens/s"
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        return f"{values}  {speed}"

    def format_time_left(self) -> str:
        """Format the remaining time as `0:03:20 left` or, in a longer command, as `0:03:20 left, 0:05:10 in total`."""
        seconds = (self.total_steps - self.step) * self.seconds
        if self.part is None:
            return f"{format_duration(seconds)} left"
        total = seconds + self.part.after * self.total_steps * self.seconds
        return f"{format_duration(seconds)} left, {format_duration(total)} in total"


class LineProgress(Progress):
    """A progress display that prints plain lines, for log files and pipes."""

    def __init__(self, rate: Rate, stream: TextIO, interval_s: float = 10.0) -> None:
        self.rate, self.stream, self.interval_s, self.clock = rate, stream, interval_s, rate.clock
        self.next_line = self.clock()

    def step(self, step: int, shown: Mapping[str, float], *, samples: int, tokens: int) -> None:
        self.rate.update(step, samples, tokens)
        if step == self.rate.total_steps or self.is_time():
            title = f"{self.rate.format_title('step')} {step}/{self.rate.total_steps}"
            self.print_line(f"{title}  {self.rate.format_facts(shown)}  {self.rate.format_time_left()}")

    @contextmanager
    def track_phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Advance]:
        begin, done, name = self.clock(), 0, self.rate.format_title(name)
        goal = "" if total is None else f"/{total}"
        self.print_line(f"{name} …" if total is None else f"{name}: {total} {unit}".rstrip())
        self.next_line = begin + self.interval_s

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if self.is_time():
                self.print_line(f"{name}: {done}{goal} {unit}".rstrip())

        with self.rate.pause():
            yield advance
        self.print_line(f"{name}: done in {format_duration(self.clock() - begin)}")
        self.next_line = self.clock()  # the next step prints a line immediately

    def is_time(self) -> bool:
        is_due = self.clock() >= self.next_line
        if is_due:
            self.next_line = self.clock() + self.interval_s
        return is_due

    def print_line(self, text: str) -> None:
        write(format_message(text), file=self.stream)


class FactsColumn(bars.TextColumn):
    """A column that is truncated if the terminal is too narrow, so that the other columns keep their width on the same line."""

    def render(self, task: bars.Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


class BarProgress(Progress):
    """A progress bar that stays at the bottom of the terminal, with log lines above it."""

    def __init__(self, rate: Rate, stream: TextIO) -> None:
        self.rate = rate
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            bars.TextColumn("{task.fields[left]}"),
            FactsColumn("{task.fields[facts]}", table_column=Column(no_wrap=False)),
        )
        self.bar = bars.Progress(*columns, console=open_console(file=stream))
        self.steps = self.bar.add_task(
            rate.format_title("step"), total=rate.total_steps, completed=rate.step, left="", facts=""
        )

    def step(self, step: int, shown: Mapping[str, float], *, samples: int, tokens: int) -> None:
        self.rate.update(step, samples, tokens)
        self.bar.update(
            self.steps, completed=step, left=self.rate.format_time_left(), facts=self.rate.format_facts(shown)
        )

    @contextmanager
    def track_phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Advance]:
        task = self.bar.add_task(self.rate.format_title(name), total=total, left="", facts=unit)
        try:
            with self.rate.pause():
                yield lambda count: self.bar.advance(task, count)
        finally:
            self.bar.remove_task(task)

    def print_line(self, text: str) -> None:
        self.bar.console.print(escape_control(text), markup=False, highlight=False)

    def close(self) -> None:
        self.bar.stop()

    def __enter__(self) -> Self:
        self.bar.start()
        return self


def format_duration(seconds: float) -> str:
    """Format a duration in seconds as `0:03:20`."""
    minutes, remaining_seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{remaining_seconds:02d}"


# ---------------------------------------------------------------- work other than training


@contextmanager
def track(name: str, total: int, unit: str) -> Iterator[Advance]:
    """Show progress towards `total` on stderr. Yield a thread-safe function to call with the number of `unit`s just completed."""
    name = to_one_line(name)
    if not total:
        yield lambda count: None
    elif sys.stderr.isatty():
        counts = (
            (bars.DownloadColumn(), bars.TransferSpeedColumn()) if unit == "bytes" else (bars.MofNCompleteColumn(),)
        )
        columns = bars.TextColumn("{task.description}"), bars.BarColumn(), *counts, bars.TimeRemainingColumn()
        with bars.Progress(*columns, console=open_console(stderr=True)) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        with track_in_lines(name, total, unit, lambda text: print_message(text, err=True)) as advance:
            yield advance


@contextmanager
def track_in_lines(
    name: str, total: int, unit: str, report: Callable[[str], object], interval_s: float = 10.0
) -> Iterator[Advance]:
    """Report progress like `track`, but by passing a line to `report` at the start and every `interval_s` seconds."""

    def format_amount(count: int) -> str:
        return decimal(count) if unit == "bytes" else str(count)

    begin = last_shown = time.monotonic()
    done, lock = 0, Lock()

    def advance(count: int) -> None:
        nonlocal done, last_shown
        with lock:
            done += count
            now = time.monotonic()
            if done > 0 and now >= last_shown + interval_s:
                last_shown = now
                seconds_left = (total - done) * (now - begin) / done
                report(f"{name}: {format_amount(done)} of {format_amount(total)}, {seconds_left:.0f} s left")

    suffix = "" if unit == "bytes" else f" {unit}"
    report(f"{name}: {format_amount(total)}{suffix}")
    yield advance
