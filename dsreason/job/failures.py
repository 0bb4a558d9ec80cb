"""Rank failures: each rank reports its own failure, and the launcher determines which failure caused the others.

This module does not import torch, because the parent process uses it before `prepare_environment` has run.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dsreason.errors import DISK_ERRORS, ConfigError, DataError, DsReasonError, NothingLearned, SaveError, Stopped
from dsreason.files.atomic import write_file
from dsreason.files.disk import to_os_error
from dsreason.media.time_limit import read_last_words
from dsreason.screen import format_message
from dsreason.secrets import hide_secrets

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

E = TypeVar("E", bound=BaseException)

ERROR_DIR = "DSREASON_ERROR_DIR"
"""Environment variable that only dsreason's launcher sets: the folder in which ranks report their errors to the launcher."""
TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable that torchrun sets: the file for a rank's error, which torchrun prints at the end of its report."""

CRASH_LOG = "dsreason.crash"
"""Name of the logger for tracebacks. It writes only to the rank's log file; other code decides what to print."""

TIME_LIMIT_EXIT_CODE = 124
"""Exit code of ranks that were ended by the watchdog, and of the command that started them."""
PEER_EXIT_CODE = 123
"""Exit code of ranks that ended because another rank failed."""
FINAL_EXIT_CODES = (ConfigError.exit_code, NothingLearned.exit_code, Stopped.exit_code)
"""Exit codes after which the ranks are not restarted."""
AGENT_PATIENCE = 30
"""Seconds that torch's agent waits after SIGTERM before it kills a rank that is still running."""
ACTIVITY_BYTES = 256
LINE_BYTES = 8192
"""Number of bytes to read from the end of a log to find its last line."""
SHARED_MEMORY, SMALL_SHARED_MEMORY = Path("/dev/shm"), 2**30
"""Mount point of shared memory, and the size in bytes below which it counts as small. Docker's default is 64 MiB."""


@dataclass(frozen=True)
class Failure:
    """The reason why a rank ended, taken from its own report or from its exit code."""

    rank: int
    text: str
    exit_code: int
    user_fixable: bool
    """Whether the error is a `DsReasonError`, which is printed without a traceback."""
    time: float
    signal: int = 0
    """Number of the signal that killed the rank; 0 if it was not killed by a signal."""
    silent: bool = False
    """Whether the rank ended without reporting why; `text` then describes what other processes observed."""
    restarts: bool = True
    """Whether a restart may help; False if the user has to change something, or stopped the job."""


class RankError(DsReasonError):
    """An error that the launcher or another rank raises because a rank has failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.exit_code = failure.exit_code
        self.label = Stopped.label if failure.exit_code == Stopped.exit_code else DsReasonError.label


def build_peer_error(failure: Failure) -> RankError:
    """Build the error with which this rank ends because another rank failed."""
    return RankError(failure if failure.user_fixable else replace(failure, exit_code=PEER_EXIT_CODE))


# Functions for ranks


def read_rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def convert_disk_error(error: E) -> E | SaveError:
    """Convert an error caused by a full or read-only disk, which is never a bug, to a SaveError; return others unchanged."""
    cause = to_os_error(error) if isinstance(error, Exception) else None
    if cause is None or cause.errno not in DISK_ERRORS:
        return error
    file = f"{cause.filename}: " if cause.filename else ""
    if not file and cause.errno == errno.ENOSPC and describe_small_shared_memory():
        file = f"perhaps {describe_small_shared_memory()}: "  # the error does not name the file
    if cause.errno == errno.EFBIG:
        max_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = (
            f"the maximum file size is {max_bytes} bytes"
            if max_bytes != resource.RLIM_INFINITY
            else "the disk does not support files this large"
        )
        return SaveError(
            f"{file}{cause.strerror}: {limit} (ulimit -f); raise the limit, and continue with --resume auto"
        )
    return SaveError(
        f"{file}{cause.strerror}; free disk space, or make the disk writable. Complete files are unchanged; continue a run "
        "with --resume auto"
    )


def describe_small_shared_memory() -> str:
    """Describe the size of /dev/shm, through which processes exchange data, if it is small; otherwise, return ""."""
    with suppress(OSError):
        usage = shutil.disk_usage(SHARED_MEMORY)
        if usage.total < SMALL_SHARED_MEMORY:
            return f"{SHARED_MEMORY} has only {usage.total >> 20} MiB (start the container with --shm-size=16g)"
    return ""


def describe_dead_worker() -> str:
    """Return a message that names possible reasons for the death of a data worker."""
    limits = f"; {describe_small_shared_memory()}" if describe_small_shared_memory() else ""
    if (max_bytes := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        limits += f"; files, and the data that a worker passes on, are limited to {max_bytes} bytes (ulimit -f)"
    return (
        "a data worker died (often because memory ran out; see the kernel log); lower data.workers or data.prefetch"
        f"{limits}"
    )


def convert_dead_worker_error(error: E) -> E | DsReasonError:
    """Convert torch's error about a dead data worker to an error that names the cause; return other errors unchanged.

    torch raises the error in a signal handler, so it may interrupt the trainer anywhere. A worker that ended itself because of
    a bad file has left a record of the reason.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or "DataLoader worker (pid" not in text:
        return error
    if reason := read_last_words(text):
        return DataError(reason)
    return DsReasonError(f"{describe_dead_worker()} ({text.strip()})")


def convert_limit_error(error: E) -> E | ConfigError:
    """Convert an error about too many open files or too little memory to a ConfigError; return other errors unchanged."""
    if isinstance(error, OSError | RuntimeError) and os.strerror(errno.EMFILE) in str(error):
        return ConfigError("too many open files; raise the limit (ulimit -n), or use fewer workers")
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return ConfigError(f"out of memory ({error}); stop other processes, or use fewer workers")
    return error


def to_readable_error(error: E) -> E | DsReasonError:
    """Convert an error caused by disk problems, resource limits or a dead data worker to one with a message for the user."""
    return convert_dead_worker_error(convert_limit_error(convert_disk_error(error)))


def build_failure(error: BaseException) -> Failure:
    error = to_readable_error(error)
    if isinstance(error, RankError):
        return error.failure
    if isinstance(error, DsReasonError):
        text, restarts = hide_secrets(str(error)), error.exit_code not in FINAL_EXIT_CODES
        return Failure(read_rank(), text, error.exit_code, user_fixable=True, time=time.time(), restarts=restarts)
    return Failure(read_rank(), format_crash(error), exit_code=1, user_fixable=False, time=time.time())


def format_crash(error: BaseException) -> str:
    text = hide_secrets("".join(traceback.format_exception(error)))
    if "DataLoader worker (pid" in text:  # the error is a consequence of the worker's death
        text += f"{describe_dead_worker()}\n"
    return text


def record_failure(failure: Failure) -> None:
    """Write the reason why this rank ends to the file that its launcher reads. Only a rank's first report is kept.

    dsreason's launcher reads every rank's file, so each rank reports only its own failure. torchrun takes the report with the
    earliest timestamp (in whole seconds) for the cause. A killed rank leaves no report, so a peer that reports its death sets
    the timestamp back by one second.
    """
    if ERROR_DIR in os.environ:
        if failure.rank == read_rank():
            write_once(Path(os.environ[ERROR_DIR]) / f"rank_{failure.rank}.json", json.dumps(asdict(failure)))
    elif TORCHRUN_ERROR_FILE in os.environ:
        timestamp = str(int(failure.time) - failure.silent)
        text = format_message(failure.text)  # torchrun prints the text unchanged
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": timestamp}}
        write_once(Path(os.environ[TORCHRUN_ERROR_FILE]), json.dumps({"message": message}))


def write_once(file: Path, text: str) -> None:
    with suppress(OSError):  # a full disk must not hide the error
        if not file.exists():
            write_file(file, text)


def record_activity(activity: str) -> None:
    """Record what this rank is doing, so that the launcher can print it if the rank is killed. Cheap enough for every phase."""
    if ERROR_DIR in os.environ:
        file = open_activity_file(Path(os.environ[ERROR_DIR]) / f"activity_{read_rank()}")
        file[:] = activity.encode().ljust(ACTIVITY_BYTES)


@cache
def open_activity_file(file: Path) -> mmap:
    file.write_bytes(bytes(ACTIVITY_BYTES))
    with file.open("r+b") as opened:
        return mmap(opened.fileno(), ACTIVITY_BYTES)


def read_last_line(log: Path) -> str:
    """Return the last non-empty line of a log, with secrets removed; "" if the log is empty or missing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LINE_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return hide_secrets(next((line.strip() for line in reversed(lines) if line.strip()), ""))


# Functions for the parent


def get_exit_codes(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """Return the failed ranks' exit codes, keyed by rank. A rank that the agent had to kill counts as ended by SIGTERM."""
    first = min(failure.timestamp for failure in failures.values())
    return {
        rank: failure.exitcode if failure.timestamp < first + AGENT_PATIENCE else -signal.SIGTERM
        for rank, failure in failures.items()
    }


def find_first_failure(reports: Sequence[Failure], exit_codes: Mapping[int, int]) -> Failure:
    """Return the failure that caused the others.

    Args:
        reports: what ranks reported before they ended; the agent may not have noticed yet that some of these ranks failed.
        exit_codes: exit codes of the failed ranks, keyed by rank; -N means that the rank was killed by signal N. After the
            first failure, the agent ends the other ranks with SIGTERM.
    """
    reported_ranks = {failure.rank for failure in reports}
    has_saved = any(report.exit_code == Stopped.exit_code for report in reports)
    if has_saved:  # a rank killed by SIGUSR1 had already removed its handler
        exit_codes = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGUSR1}
    silent = [_build_silent_failure(rank, code) for rank, code in exit_codes.items() if rank not in reported_ranks]
    followed = (-signal.SIGTERM, -signal.SIGABRT, PEER_EXIT_CODE)
    killed = [failure for failure in silent if exit_codes[failure.rank] not in followed]
    user_fixable = [failure for failure in reports if failure.user_fixable]
    late = [failure for failure in reports if failure.exit_code == TIME_LIMIT_EXIT_CODE]
    if late and not user_fixable:
        # List what every rank was doing when the watchdog ended it; the rank that exceeded its limit first comes last.
        unheard = sorted(exit_codes.keys() - {failure.rank for failure in late})
        texts = [f"rank {rank} did not report what it was doing; its log may show it\n" for rank in unheard]
        texts += [failure.text for failure in sorted(late, key=lambda failure: failure.time, reverse=True)]
        return replace(min(late, key=lambda failure: failure.time), text="\n".join(texts))
    # A killed rank's peers fail too, with less informative messages (a lost connection, an unreachable host).
    by_signal = [failure for failure in killed if failure.signal]
    candidates = by_signal or user_fixable or killed or reports or silent
    return min(candidates, key=lambda failure: (failure.time, failure.rank))


def _build_silent_failure(rank: int, exit_code: int) -> Failure:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (often because memory ran out; see the kernel log)" if name == "SIGKILL" else ""
        text = f"rank {rank} was killed by {name}{hint}"
    else:
        text = f"rank {rank} ended with exit code {exit_code} but without a traceback"
    return Failure(rank, text, exit_code=1, user_fixable=False, time=0.0, signal=max(0, -exit_code), silent=True)


def add_last_log_line(failure: Failure, error_dir: Path, log: Path) -> Failure:
    """Add the rank's last activity and last log line to its failure if the rank ended without a report."""
    if not failure.silent:
        return failure
    activity, line = error_dir / f"activity_{failure.rank}", read_last_line(log)
    text = f"{failure.text} {activity.read_text().strip()}" if activity.exists() else failure.text
    return replace(failure, text=f"{text}\nits last log line: {line}" if line else text)
