"""Parts of a GPU report, each of which fails in a different way and runs in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

from benchmarks.gpu_report.parts import BenchmarkSetup, SkipPart, Value


def works(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    yield "speed", 2.0
    yield "name", "card"


def hangs(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Hang and leave a child process in a separate session, as a rank does."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield "speed", 1.0
    yield "child", child.pid
    time.sleep(300)


def crashes(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    yield "speed", 1.0
    raise RuntimeError(f"nothing in {setup.scratch / 'deep' / 'folder'}")


def dies(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    yield "speed", float("inf")
    os.kill(os.getpid(), signal.SIGKILL)


def skips(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    yield "speed", 1.0
    raise SkipPart("needs a card of 70 GiB, and this one has 24")
