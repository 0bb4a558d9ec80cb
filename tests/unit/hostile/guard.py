"""Functions that run code which may hang, exhaust memory or crash in a child process, and that detect stray files."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
import torch

from dsreason.errors import DsReasonError
from dsreason.monitor.memory import read_status_bytes

T = TypeVar("T")

CPU_SECONDS = 20
WALL_SECONDS = 120
MEMORY_BYTES = 2 * 1024**3
"""Number of bytes that the child may allocate beyond the memory of this process."""


def refused(function: Callable[[], object], error: type[DsReasonError], *words: str) -> None:
    """Assert that `function` raises `error` with all `words` in its message, and leaves no file in the parent folder."""
    before = listing(Path.cwd().parent)
    with pytest.raises(error) as caught:
        guarded(function)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text
    assert listing(Path.cwd().parent) == before


def guarded(function: Callable[[], T]) -> T:
    """Run `function` in a forked child with limits on processor time and memory; return its result or raise its error.

    Raises:
    AssertionError: it hits a limit, is killed by a signal or raises anything but a `DsReasonError`.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run(function, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), f"{signal.Signals(os.WTERMSIG(status)).name}: it hangs or crashes"
    result, error, trace = pickle.loads(outcome)
    if error is not None:
        raise error
    assert not trace, trace
    return result


def _run(function: Callable[[], object], writer: int) -> NoReturn:
    torch.set_num_threads(1)  # OpenMP's threads do not exist after a fork
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    signal.alarm(WALL_SECONDS)
    limit = read_status_bytes("VmSize") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        outcome = function(), None, ""
    except DsReasonError as error:
        outcome = None, error, ""
    except BaseException:
        outcome = None, None, traceback.format_exc()
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(outcome, pipe)
    os._exit(0)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and modification time of every file and folder in `folder`; links are not followed."""
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in paths
        if not path.is_dir()
    }
