"""How long work of the data commands is shown: a bar with the time left on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.filesize import decimal

INTERVAL_S = 10.0


@contextmanager
def track(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields what is called with the number of `unit`s just done, of `total`. Written to stderr: results go to stdout."""
    if not total:
        yield lambda count: None
    elif sys.stderr.isatty():
        count = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
        text, bar, left = bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TimeRemainingColumn()
        with bars.Progress(text, bar, count, left, console=Console(stderr=True)) as shown:
            task = shown.add_task(name, total=total)
            yield lambda count: shown.advance(task, count)
    else:
        yield from lines(name, total, unit)


def lines(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    def amount(count: int) -> str:
        return decimal(count) if unit == "bytes" else str(count)

    begin = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if done > 0 and now >= shown + INTERVAL_S:
            shown = now
            left = (total - done) * (now - begin) / done
            say(f"{name}: {amount(done)} of {amount(total)}, {left:.0f} s left")

    suffix = "" if unit == "bytes" else f" {unit}"
    say(f"{name}: {amount(total)}{suffix}")
    yield advance


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
