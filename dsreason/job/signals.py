"""Handlers for signals that stop a command. They end the command cleanly, or forward the signals to its ranks."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from dsreason.errors import Stopped
from dsreason.job.failures import RankError
from dsreason.stopping import request_stop

LAUNCHER_PID = "DSREASON_LAUNCHER_PID"
"""Environment variable in which dsreason's launcher passes its process id to its ranks."""
ECHO_TIME = 3.0
"""Seconds during which a further signal counts as the same request; a rank may get it from both Slurm and its launcher."""

ASK_TO_STOP = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Stop signals, in this order: a warning from Slurm, a scheduler that reclaims the machine, Ctrl-C, and a closed terminal."""

MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """Exception raised by a stop signal. It derives from BaseException, so that `except Exception` does not catch it."""


def select_not_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore.

    A process started by `nohup` ignores SIGHUP, and a process started with `&` in a script ignores Ctrl-C; such processes must
    keep running.
    """
    return [
        number for number in numbers if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    ]


def should_end_at_once(number: int, first_time: float) -> bool:
    """Return whether a signal after the first stop request ends the command immediately.

    SIGUSR1 never does, and signals within `ECHO_TIME` of the first one are regarded as echoes of it.

    Args:
        first_time: monotonic time of the first request.
    """
    return number != signal.SIGUSR1 and time.monotonic() - first_time > ECHO_TIME


def end_at_signals() -> None:
    """Make stop signals end this command with a message, or immediately if a second one arrives.

    Code that can save its state before it ends installs its own handlers instead.
    """
    request_times: list[float] = []

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not request_times:
            request_times.append(time.monotonic())
            request_stop(name)  # for waits in threads, and in case a library replaces `Interrupted`
            raise Interrupted(name)
        if should_end_at_once(number, request_times[0]):
            with suppress(OSError):
                os.write(2, f"ended immediately by a second {name}\n".encode())
            os._exit(128 + number)

    numbers = select_not_ignored(ASK_TO_STOP)
    for number in numbers:
        signal.signal(number, end)

    def set_all(handler: signal.Handlers) -> None:
        for number in numbers:
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=lambda: set_all(signal.SIG_DFL))  # the parent ends its forked workers itself
    atexit.register(set_all, signal.SIG_IGN)  # a signal during shutdown would change the exit code


@contextmanager
def add_stop_message(text: str) -> Iterator[None]:
    """If a signal stops the block, append `text` to the message, unless a rank has already reported its own message."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(f"{stop}; {text}") from None
    except RankError as error:
        if error.exit_code != Stopped.exit_code or error.failure.signal == 0:
            raise
        raise Stopped(f"{error}; {text}") from None


@contextmanager
def forward_signals() -> Iterator[list[str]]:
    """Forward stop signals to the command's ranks, and yield a list to which the names of received signals are added.

    The first signal is forwarded as SIGUSR1, upon which the ranks save and end. A later signal, unless it is SIGUSR1 again, is
    forwarded as SIGTERM, which ends the ranks immediately; torch's agent also sends SIGTERM to the peers of a failed rank. If
    no rank has started yet, the first signal ends the command.
    """
    received: list[str] = []
    first_time = 0.0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal first_time
        if received and not should_end_at_once(number, first_time):
            return
        first_time = first_time or time.monotonic()
        received.append(signal.Signals(number).name)
        ranks = [child for child in psutil.Process().children() if _is_started_rank(child)]
        if not ranks:
            raise Interrupted(received[0])
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1 if len(received) == 1 else signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in select_not_ignored(ASK_TO_STOP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_started_rank(child: psutil.Process) -> bool:
    """Return whether the child is a rank, running or ended, rather than, say, multiprocessing's resource tracker."""
    with suppress(psutil.NoSuchProcess):
        return child.status() == psutil.STATUS_ZOMBIE or LAUNCHER_PID in child.environ()
    return False
