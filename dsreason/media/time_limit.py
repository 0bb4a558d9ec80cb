"""How much processor time and memory one image or video may take, whatever its format and the reason."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NoReturn

import psutil

from dsreason.errors import ConfigError, DataError
from dsreason.screen import as_message

SECONDS, SECONDS_PER_MEGABYTE = 30.0, 10.0
"""Of every file, and for each megabyte of it: ordinary films take a second or two a megabyte, still scenes several."""
MOST_OF_AN_IMAGE = 5_000_000
"""Bytes that count of an image: the largest of noise in the slowest format (JPEG 2000) takes a minute; padding buys none."""
TIME_VARIABLE = "DSREASON_MEDIA_SECONDS"
"""Takes the place of `SECONDS`. Processor time, not the clock's: a loaded machine makes no good file fail."""
ENDLESS = 10
"""Seconds beyond the limit after which a decoder's call is not waited for: it cannot be interrupted, so the process ends."""

MEMORY = 8 << 30
"""Bytes that a process may grow by while it reads a file; one that does other things beside, half of the machine's memory."""
TICK = 0.5
"""Seconds between two looks."""

LAST_WORDS = mmap(-1, 4096)
"""Shared with the processes forked from this one: the id of the one that ended itself last, and why."""


@dataclass(frozen=True)
class Limit:
    """What one thread reads, and since when (as `clock` counts)."""

    file: Path
    size: int
    seconds: float
    clock: int
    started: float
    resident: int
    """Bytes of this process in memory at that time."""

    def left(self) -> float:
        return self.seconds - (time.clock_gettime(self.clock) - self.started)

    def error(self) -> DataError:
        return DataError(
            f"{self.file}: reading it took {self.seconds - self.left():.3g} s of processor time, more than {self.seconds:.3g} s, "
            f"the limit of a file of {self.size} bytes; save it again in an ordinary form, or set "
            f"{TIME_VARIABLE} higher"
        )

    def memory_error(self, most: int) -> DataError:
        return DataError(
            f"{self.file}: reading it took more than {most >> 20} MiB of memory; save it again in an ordinary form"
        )


_limits: dict[int, Limit] = {}
"""By thread."""
_watch: list[threading.Thread] = []


@contextmanager
def time_limit(file: Path, *, own_threads: bool = False, factor: int = 1, most: float = math.inf) -> Iterator[None]:
    """Inside and at the end, `check_time` raises once this thread has taken longer than the file may take, `factor` times.

    `own_threads`: the process's time counts, not only this thread's, as decoders have threads of their own. `most`: bytes
    of the file that give it time.
    """
    thread = threading.get_ident()
    clock = time.CLOCK_PROCESS_CPUTIME_ID if own_threads else time.pthread_getcpuclockid(thread)
    outer = _limits.get(thread)
    size = size_on_disk(file)
    seconds = factor * seconds_of(min(size, most))
    _limits[thread] = Limit(file, size, seconds, clock, time.clock_gettime(clock), resident())
    if not _watch:
        _watch.append(threading.Thread(target=_end_what_is_endless, name="media", daemon=True))
        _watch[0].start()
    try:
        yield
        check_time()  # a decoder may do everything in one call
    finally:
        if outer is None:
            del _limits[thread]
        else:
            _limits[thread] = outer


def size_on_disk(file: Path) -> int:
    """In bytes, without holes. Some file systems say 0 blocks for a file that has content."""
    status = file.stat()
    return min(status.st_size, 512 * status.st_blocks) if status.st_blocks else status.st_size


def seconds_of(size: float) -> float:
    seconds_text = os.environ.get(TIME_VARIABLE)
    if seconds_text is not None and not seconds_text.isdecimal():
        raise ConfigError(f"{TIME_VARIABLE}={seconds_text}: must be a whole number of seconds")
    return (SECONDS if seconds_text is None else float(seconds_text)) + SECONDS_PER_MEGABYTE * size / 1e6


def check_time() -> None:
    """To be called wherever a decoder's work comes back to Python."""
    limit = _limits.get(threading.get_ident())
    if limit and limit.left() < 0:
        raise limit.error()


def _end_what_is_endless() -> None:
    while True:
        time.sleep(TICK)
        if not (limits := list(_limits.values())):
            continue
        now, most = resident(), len(limits) * may_grow_by()
        for limit in limits:
            if now - limit.resident > most:
                end_process(limit.memory_error(most))
            with suppress(OSError):  # the thread has ended since
                if limit.left() < -ENDLESS:
                    end_process(limit.error())


def resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)


def may_grow_by() -> int:
    return MEMORY if multiprocessing.parent_process() else max(MEMORY, psutil.virtual_memory().total // 2)


def end_process(error: DataError) -> NoReturn:
    """End this process, another thread of which is in a call that does not come back."""
    if multiprocessing.parent_process():
        words = f"{os.getpid()} {error}".encode()[: len(LAST_WORDS)]
        LAST_WORDS[:] = words.ljust(len(LAST_WORDS), b"\0")
    else:
        os.write(2, f"{as_message(f'{error.label}{error}')}\n".encode())
    os._exit(error.exit_code)


def last_words(dead: str) -> str:
    """Return why a process forked from this one ended itself, if its id is in `dead`; else ""."""
    pid, _, words = LAST_WORDS[:].rstrip(b"\0").decode(errors="ignore").partition(" ")
    return words if pid in re.findall(r"\d+", dead) else ""


def _forget() -> None:
    _limits.clear()
    _watch.clear()


os.register_at_fork(after_in_child=_forget)  # where no other thread is
