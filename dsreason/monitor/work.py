"""How long work beside training is shown: a bar with the time left on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal

from dsreason.monitor.progress import Advance


@contextmanager
def track(name: str, total: int, unit: str) -> Iterator[Advance]:
    """Yields what is called, from any thread, with the number of `unit`s just done, of `total`. Shown on stderr."""
    if not total:
        yield lambda count: None
    elif sys.stderr.isatty():
        counts = (
            (bars.DownloadColumn(), bars.TransferSpeedColumn()) if unit == "bytes" else (bars.MofNCompleteColumn(),)
        )
        columns = bars.TextColumn("{task.description}"), bars.BarColumn(), *counts, bars.TimeRemainingColumn()
        with bars.Progress(*columns, console=Console(stderr=True)) as shown:
            task = shown.add_task(name, total=total)
            yield lambda count: shown.advance(task, count)
    else:
        with track_in_lines(name, total, unit, lambda text: print(text, file=sys.stderr, flush=True)) as advance:
            yield advance


@contextmanager
def track_in_lines(
    name: str, total: int, unit: str, say: Callable[[str], object], interval_s: float = 10.0
) -> Iterator[Advance]:
    """As `track`, by a first line and one every `interval_s` seconds."""

    def amount(count: int) -> str:
        return decimal(count) if unit == "bytes" else str(count)

    begin = shown = time.monotonic()
    done, lock = 0, Lock()

    def advance(count: int) -> None:
        nonlocal done, shown
        with lock:
            done += count
            now = time.monotonic()
            if done > 0 and now >= shown + interval_s:
                shown = now
                left = (total - done) * (now - begin) / done
                say(f"{name}: {amount(done)} of {amount(total)}, {left:.0f} s left")

    suffix = "" if unit == "bytes" else f" {unit}"
    say(f"{name}: {amount(total)}{suffix}")
    yield advance
