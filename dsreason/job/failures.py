"""Failures of ranks: how a rank reports its own to its launcher, and which one caused the others.

Nothing here imports torch: the parent has to run before `prepare_environment`.
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

from dsreason.errors import DISK_ERRORS, ConfigError, DataError, DsReasonError, SaveError, Stopped
from dsreason.files.atomic import write_file
from dsreason.files.disk import as_os_error
from dsreason.media.time_limit import last_words
from dsreason.screen import as_message
from dsreason.secrets import hide_secrets

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

E = TypeVar("E", bound=BaseException)

ERROR_DIR = "DSREASON_ERROR_DIR"
"""Set by our own launcher only: the folder that ranks write their errors to, for the parent to print."""
TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by torchrun: what a rank writes there ends torchrun's last report."""

CRASH_LOG = "dsreason.crash"
"""Logger of tracebacks: they go to the rank's log file only, what the screen shows is decided elsewhere."""

TIME_LIMIT_EXIT_CODE = 124
"""Of ranks that the watchdog ended, and of the command then."""
PEER_EXIT_CODE = 123
"""Of ranks that ended because another one has failed."""
FINAL_EXIT_CODES = (ConfigError.exit_code, Stopped.exit_code)
"""After which nothing is started again."""
AGENT_PATIENCE = 30
"""Seconds after which torch's agent kills a rank that SIGTERM did not end."""
ACTIVITY_BYTES = 256
LINE_BYTES = 8192
"""Of the end of a log, to find its last line in."""
SHARED_MEMORY, SMALL_SHARED_MEMORY = Path("/dev/shm"), 2**30
"""Docker gives a container 64 MiB of it."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: its own report, or what its exit code says."""

    rank: int
    text: str
    exit_code: int
    user_fixable: bool
    """A `DsReasonError`: printed without a traceback."""
    time: float
    signal: int = 0
    """The one that killed it; 0 if none did."""
    silent: bool = False
    """The rank reported nothing; the text is what others noticed."""
    restarts: bool = True
    """Whether another start may help: not where a person has to change something, or has asked for the end."""


class RankError(DsReasonError):
    """A rank's failure, as its parent or another rank raises it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.exit_code = failure.exit_code
        self.label = Stopped.label if failure.exit_code == Stopped.exit_code else DsReasonError.label


def peer_error(failure: Failure) -> RankError:
    """Another rank's failure, as what ends this one."""
    return RankError(failure if failure.user_fixable else replace(failure, exit_code=PEER_EXIT_CODE))


# In a rank


def own_rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def disk_error_as_save_error(error: E) -> E | SaveError:
    """A full or read-only disk is nobody's bug, wherever it occurs: a text for people."""
    cause = as_os_error(error) if isinstance(error, Exception) else None
    if cause is None or cause.errno not in DISK_ERRORS:
        return error
    file = f"{cause.filename}: " if cause.filename else ""
    if not file and cause.errno == errno.ENOSPC and shared_memory():
        file = f"perhaps {shared_memory()}: "  # nobody says where a write failed
    if cause.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        found = (
            f"files may have {most} bytes here" if most != resource.RLIM_INFINITY else "the disk takes none so large"
        )
        return SaveError(f"{file}{cause.strerror}: {found} (ulimit -f); raise that, and continue with --resume auto")
    return SaveError(
        f"{file}{cause.strerror}; make room there, or make it writable. What was complete before is as it was, and a run "
        "continues with --resume auto"
    )


def shared_memory() -> str:
    """How large a small /dev/shm is, through which processes hand data over; "" of an ordinary one."""
    with suppress(OSError):
        usage = shutil.disk_usage(SHARED_MEMORY)
        if usage.total < SMALL_SHARED_MEMORY:
            return f"{SHARED_MEMORY} has {usage.total >> 20} MiB in all (a container gets more by --shm-size=16g)"
    return ""


def dead_worker() -> str:
    """Return why a data worker may have died."""
    small = f"; {shared_memory()}" if shared_memory() else ""
    if (most := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        small += f"; a file, and what it hands over, may have {most} bytes here (ulimit -f)"
    return f"a data worker died (often: out of memory; see the kernel log): lower data.workers or data.prefetch{small}"


def dead_worker_as_error(error: E) -> E | DsReasonError:
    """torch tells of a dead data worker from a signal handler, wherever the trainer happens to be. One that ended itself over a
    file has left its reason."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "DataLoader worker (pid" not in text:
        return error
    if words := last_words(text):
        return DataError(words)
    return DsReasonError(f"{dead_worker()} ({text.strip()})")


def limit_as_config_error(error: E) -> E | ConfigError:
    """Return a sentence if open files or memory ran out, which is nobody's bug."""
    if isinstance(error, OSError | RuntimeError) and os.strerror(errno.EMFILE) in str(error):
        return ConfigError("too many open files; raise the limit (ulimit -n), or use fewer workers")
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return ConfigError(f"out of memory ({error}); end other processes, or use fewer workers")
    return error


def error_for_people(error: E) -> E | DsReasonError:
    """Turn the limits of the machine and the shell, and dead data workers, into sentences."""
    return dead_worker_as_error(limit_as_config_error(disk_error_as_save_error(error)))


def failure_of(error: BaseException) -> Failure:
    error = error_for_people(error)
    if isinstance(error, RankError):
        return error.failure
    if isinstance(error, DsReasonError):
        text, restarts = hide_secrets(str(error)), error.exit_code not in FINAL_EXIT_CODES
        return Failure(own_rank(), text, error.exit_code, user_fixable=True, time=time.time(), restarts=restarts)
    return Failure(own_rank(), crash_text(error), exit_code=1, user_fixable=False, time=time.time())


def crash_text(error: BaseException) -> str:
    text = hide_secrets("".join(traceback.format_exception(error)))
    if "DataLoader worker (pid" in text:  # what another error followed from
        text += f"{dead_worker()}\n"
    return text


def record_failure(failure: Failure) -> None:
    """Write why this rank ends where its launcher looks; the first report counts.

    Our own parent looks at every rank: it needs no hearsay. torchrun takes the earliest for the cause, in whole seconds,
    and a rank that was killed has left nothing.
    """
    if ERROR_DIR in os.environ:
        if failure.rank == own_rank():
            write_once(Path(os.environ[ERROR_DIR]) / f"rank_{failure.rank}.json", json.dumps(asdict(failure)))
    elif TORCHRUN_ERROR_FILE in os.environ:
        when = str(int(failure.time) - failure.silent)
        text = as_message(failure.text)  # torchrun prints it as it is
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": when}}
        write_once(Path(os.environ[TORCHRUN_ERROR_FILE]), json.dumps({"message": message}))


def write_once(file: Path, text: str) -> None:
    with suppress(OSError):  # nor may a full disk hide the error
        if not file.exists():
            write_file(file, text)


def record_activity(activity: str) -> None:
    """Write what this rank is doing, for the parent to print if it is killed. Several times a step: it has to be cheap."""
    if ERROR_DIR in os.environ:
        file = activity_file(Path(os.environ[ERROR_DIR]) / f"activity_{own_rank()}")
        file[:] = activity.encode().ljust(ACTIVITY_BYTES)


@cache
def activity_file(file: Path) -> mmap:
    file.write_bytes(bytes(ACTIVITY_BYTES))
    with file.open("r+b") as opened:
        return mmap(opened.fileno(), ACTIVITY_BYTES)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, without secrets; "" if there is none, or no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LINE_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return hide_secrets(next((line.strip() for line in reversed(lines) if line.strip()), ""))


# In the parent


def exit_codes(failures: Mapping[int, ProcessFailure]) -> dict[int, int]:
    """Of the ranks that ended badly; a rank that the agent had to kill counts as ended by its SIGTERM."""
    first = min(failure.timestamp for failure in failures.values())
    return {
        rank: failure.exitcode if failure.timestamp < first + AGENT_PATIENCE else -signal.SIGTERM
        for rank, failure in failures.items()
    }


def first_failure(reports: Sequence[Failure], exit_codes: Mapping[int, int]) -> Failure:
    """The failure that caused the others.

    Args:
        reports: what ranks wrote before they ended, also those that the agent had not yet seen fail.
        exit_codes: of the ranks that ended badly; negative: the signal that killed them. After the first failure the
            agent ends the others with SIGTERM.
    """
    reported_ranks = {failure.rank for failure in reports}
    has_saved = any(report.exit_code == Stopped.exit_code for report in reports)
    if has_saved:  # SIGUSR1 came late to the ranks that it ended
        exit_codes = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGUSR1}
    silent = [_silent_failure(rank, code) for rank, code in exit_codes.items() if rank not in reported_ranks]
    followed = (-signal.SIGTERM, -signal.SIGABRT, PEER_EXIT_CODE)
    killed = [failure for failure in silent if exit_codes[failure.rank] not in followed]
    user_fixable = [failure for failure in reports if failure.user_fixable]
    late = [failure for failure in reports if failure.exit_code == TIME_LIMIT_EXIT_CODE]
    if late and not user_fixable:
        # Where every rank was when the watchdog ended them; last the one that exceeded its limit first.
        unheard = sorted(exit_codes.keys() - {failure.rank for failure in late})
        texts = [f"rank {rank} did not say where it was; its log may\n" for rank in unheard]
        texts += [failure.text for failure in sorted(late, key=lambda failure: failure.time, reverse=True)]
        return replace(min(late, key=lambda failure: failure.time), text="\n".join(texts))
    # A rank that is killed takes its peers along: what they say (a lost connection, a host not reached) says less.
    by_signal = [failure for failure in killed if failure.signal]
    candidates = by_signal or user_fixable or killed or reports or silent
    return min(candidates, key=lambda failure: (failure.time, failure.rank))


def _silent_failure(rank: int, exit_code: int) -> Failure:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (often: out of memory; see the kernel log)" if name == "SIGKILL" else ""
        text = f"rank {rank} was killed by {name}{hint}"
    else:
        text = f"rank {rank} ended with exit code {exit_code} and left no traceback"
    return Failure(rank, text, exit_code=1, user_fixable=False, time=0.0, signal=max(0, -exit_code), silent=True)


def with_last_log_line(failure: Failure, error_dir: Path, log: Path) -> Failure:
    """With what a rank that reported nothing was doing, and the end of its log."""
    if not failure.silent:
        return failure
    activity, line = error_dir / f"activity_{failure.rank}", last_line(log)
    text = f"{failure.text} {activity.read_text().strip()}" if activity.exists() else failure.text
    return replace(failure, text=f"{text}\nits last log line: {line}" if line else text)
