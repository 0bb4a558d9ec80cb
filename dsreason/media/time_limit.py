"""Limits on the CPU time and memory for reading an image or video of any format."""

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
from dsreason.screen import format_message

SECONDS, SECONDS_PER_MEGABYTE = 30.0, 10.0
"""CPU seconds allowed per file, plus CPU seconds per megabyte. Ordinary films take one or two seconds per megabyte, still scenes
several."""
MOST_OF_AN_IMAGE = 5_000_000
"""Maximum number of an image's bytes that extend its time limit. Even in JPEG 2000, the slowest format, the largest image of
noise takes only a minute; any more bytes are padding."""
TIME_VARIABLE = "DSREASON_MEDIA_SECONDS"
"""Environment variable that overrides `SECONDS`. Only CPU time counts, so valid files do not fail on a busy machine."""
ENDLESS = 10
"""Seconds beyond the limit after which the process ends itself, because a decoder call that hangs cannot be interrupted."""

MEMORY = 8 << 30
"""Bytes by which a process may grow while it reads a file; the main process may use half of the machine's memory if larger."""
TICK = 0.5
"""Seconds between checks."""

LAST_WORDS = mmap(-1, 4096)
"""Memory shared with the processes forked from this one. It holds the pid of the last process that ended itself, and the
reason."""


@dataclass(frozen=True)
class Limit:
    """The limits for the file that a thread is reading; `started` is in seconds on `clock`."""

    file: Path
    size: int
    seconds: float
    clock: int
    started: float
    resident: int
    """Resident memory of this process when reading started, in bytes."""

    def compute_remaining_seconds(self) -> float:
        return self.seconds - (time.clock_gettime(self.clock) - self.started)

    def build_error(self) -> DataError:
        used_seconds = self.seconds - self.compute_remaining_seconds()
        return DataError(
            f"{self.file}: reading it took {used_seconds:.3g} s of CPU time, but the limit for a file of "
            f"{self.size} bytes is {self.seconds:.3g} s; save it in a common format, or raise {TIME_VARIABLE}"
        )

    def build_memory_error(self, most: int) -> DataError:
        return DataError(
            f"{self.file}: reading it took more than {most >> 20} MiB of memory, which is the limit; save it in a "
            "common format"
        )


_limits: dict[int, Limit] = {}
"""Thread id → limit for the file that the thread is reading."""
_watch: list[threading.Thread] = []


@contextmanager
def time_limit(file: Path, *, own_threads: bool = False, factor: int = 1, most: float = math.inf) -> Iterator[None]:
    """Make `check_time` raise, in the block and at its end, once reading exceeds `factor` times the file's time limit.

    Args:
        own_threads: count the CPU time of the entire process, because the decoder starts threads.
        most: maximum number of the file's bytes that extend the limit.
    """
    thread = threading.get_ident()
    clock = time.CLOCK_PROCESS_CPUTIME_ID if own_threads else time.pthread_getcpuclockid(thread)
    outer = _limits.get(thread)
    size = get_size_on_disk(file)
    seconds = factor * compute_seconds(min(size, most))
    _limits[thread] = Limit(file, size, seconds, clock, time.clock_gettime(clock), read_resident_bytes())
    if not _watch:
        _watch.append(threading.Thread(target=_end_if_stuck, name="media", daemon=True))
        _watch[0].start()
    try:
        yield
        check_time()  # a decoder may do all its work in one call, without a check in between
    finally:
        if outer is None:
            del _limits[thread]
        else:
            _limits[thread] = outer


def get_size_on_disk(file: Path) -> int:
    """Return a file's size in bytes without holes, or its full size if the file system does not report blocks."""
    status = file.stat()
    return min(status.st_size, 512 * status.st_blocks) if status.st_blocks else status.st_size


def compute_seconds(size: float) -> float:
    seconds_text = os.environ.get(TIME_VARIABLE)
    if seconds_text is not None and not seconds_text.isdecimal():
        raise ConfigError(f"{TIME_VARIABLE} must be a whole number of seconds; got {seconds_text!r}")
    return (SECONDS if seconds_text is None else float(seconds_text)) + SECONDS_PER_MEGABYTE * size / 1e6


def check_time() -> None:
    """Raise DataError if this thread's file has exceeded its time limit. Call it whenever a decoder returns to Python."""
    limit = _limits.get(threading.get_ident())
    if limit and limit.compute_remaining_seconds() < 0:
        raise limit.build_error()


def _end_if_stuck() -> None:
    while True:
        time.sleep(TICK)
        if not (limits := list(_limits.values())):
            continue
        now, most = read_resident_bytes(), len(limits) * compute_max_growth()
        for limit in limits:
            if now - limit.resident > most:
                end_process(limit.build_memory_error(most))
            with suppress(OSError):  # the thread may have ended
                if limit.compute_remaining_seconds() < -ENDLESS:
                    end_process(limit.build_error())


def read_resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def compute_max_growth() -> int:
    return MEMORY if multiprocessing.parent_process() else max(MEMORY, psutil.virtual_memory().total // 2)


def end_process(error: DataError) -> NoReturn:
    """End this process because a call in another thread exceeds a limit and cannot be interrupted."""
    if multiprocessing.parent_process():
        words = f"{os.getpid()} {error}".encode()[: len(LAST_WORDS)]
        LAST_WORDS[:] = words.ljust(len(LAST_WORDS), b"\0")
    else:
        os.write(2, f"{format_message(f'{error.label}{error}')}\n".encode())
    os._exit(error.exit_code)


def read_last_words(dead: str) -> str:
    """Return why a process forked from this one ended itself, if its pid appears in the text `dead`; otherwise ""."""
    pid, _, words = LAST_WORDS[:].rstrip(b"\0").decode(errors="ignore").partition(" ")
    return words if pid in re.findall(r"\d+", dead) else ""


def _clear_limits() -> None:
    _limits.clear()
    _watch.clear()


os.register_at_fork(after_in_child=_clear_limits)  # only the forking thread exists in the child
