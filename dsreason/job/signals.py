"""Signals that stop a command: they end it in order, and are forwarded to its ranks."""

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

LAUNCHER_PID = "DSREASON_LAUNCHER_PID"
"""Environment variable that our launcher sets in its ranks: its process id."""
ECHO_TIME = 3.0
"""Seconds in which a request may repeat: Slurm and `timeout` signal a launcher and its ranks, which it signals as well."""

ASK_TO_STOP = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of Slurm's warning, of a scheduler that reclaims the machine, of Ctrl-C, and of a closed terminal."""

MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)

STOPPED_BY: list[str] = []
"""Name of the signal that ended this command, if any: a library may catch `Interrupted` and raise another error instead."""


class Interrupted(BaseException):
    """A signal to this command to end. It does not derive from Exception, which other code might catch and continue."""


def select_heeded(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that are not ignored.

    A job goes on when its terminal is closed under `nohup`, and when a script that started it with `&` gets Ctrl-C.
    """
    return [
        number for number in numbers if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    ]


def should_end_at_once(number: int, noted: float) -> bool:
    """Return whether a signal that follows the first request to stop, at the monotonic time `noted`, ends the command at once.

    SIGUSR1 may be repeated, and any signal may be an echo of the first.
    """
    return number != signal.SIGUSR1 and time.monotonic() - noted > ECHO_TIME


def end_at_signals() -> None:
    """Make the signals that stop a job end this command with a message, and at once when they are repeated.

    Code that can save something first installs its own handlers instead.
    """
    noted: list[float] = []

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not noted:
            noted.append(time.monotonic())
            STOPPED_BY.append(name)
            raise Interrupted(name)
        if should_end_at_once(number, noted[0]):
            with suppress(OSError):
                os.write(2, f"ended at once by a second {name}\n".encode())
            os._exit(128 + number)

    numbers = select_heeded(ASK_TO_STOP)
    for number in numbers:
        signal.signal(number, end)

    def set_all(handler: signal.Handlers) -> None:
        for number in numbers:
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=lambda: set_all(signal.SIG_DFL))  # the parent ends its workers
    atexit.register(set_all, signal.SIG_IGN)  # a signal while Python exits would kill it and change its exit code


@contextmanager
def add_stop_message(text: str) -> Iterator[None]:
    """Add `text`, which says what remains, to the message of a signal that ends the block, unless a rank has reported more."""
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
    """Forward the signals that stop the command to its ranks, and yield the names of the signals received.

    The first is sent as SIGUSR1, which lets ranks save first. A later Ctrl-C or SIGTERM is sent as SIGTERM, which ends them
    at once; the agent sends it, too, to the peers of a rank that failed. If no rank has started, the first ends the command.
    """
    received: list[str] = []
    noted = 0.0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if received and not should_end_at_once(number, noted):
            return
        noted = noted or time.monotonic()
        received.append(signal.Signals(number).name)
        ranks = [child for child in psutil.Process().children() if _is_started_rank(child)]
        if not ranks:
            raise Interrupted(received[0])
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1 if len(received) == 1 else signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in select_heeded(ASK_TO_STOP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_started_rank(child: psutil.Process) -> bool:
    """Return whether the child is a rank, also if it has ended; multiprocessing's resource tracker, for example, is not."""
    with suppress(psutil.NoSuchProcess):
        return child.status() == psutil.STATUS_ZOMBIE or LAUNCHER_PID in child.environ()
    return False
