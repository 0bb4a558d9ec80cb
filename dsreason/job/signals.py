"""Signals that ask a command to stop: how it ends, and how its ranks hear of them."""

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
"""Environment variable of the ranks that we start."""
ECHO_TIME = 3.0
"""Seconds in which the same request comes twice: Slurm and `timeout` signal a launcher and its ranks, and it signals them too."""

ASK_TO_STOP = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Slurm's warning, a scheduler that takes the machine back, Ctrl-C, a terminal that was closed."""

MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)

STOPPED_BY: list[str] = []
"""The signal that asked this command to end: a library may catch `Interrupted` on its way and raise an error of its own."""


class Interrupted(BaseException):
    """A signal asked this command to end. It is no Exception, which somebody might take for a failure and go on."""


def heeded(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Without those that are ignored: the job is to go on when its terminal is closed (`nohup`), and beside a script that
    started it with `&` and gets Ctrl-C."""
    return [
        number for number in numbers if number not in MAY_BE_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    ]


def demands_immediate_end(number: int, noted: float) -> bool:
    """Return whether a signal after the first request to stop, of the monotonic time `noted`, asks for the end at once.

    SIGUSR1 may be repeated, and any may be an echo of the first.
    """
    return number != signal.SIGUSR1 and time.monotonic() - noted > ECHO_TIME


def end_at_signals() -> None:
    """Let what asks a job to stop end this command with a sentence, and at once when it is repeated.

    Who can save something first puts a handler of its own in its place.
    """
    noted: list[float] = []

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not noted:
            noted.append(time.monotonic())
            STOPPED_BY.append(name)
            raise Interrupted(name)
        if demands_immediate_end(number, noted[0]):
            with suppress(OSError):
                os.write(2, f"ended at once by a second {name}\n".encode())
            os._exit(128 + number)

    numbers = heeded(ASK_TO_STOP)
    for number in numbers:
        signal.signal(number, end)

    def set_all(handler: signal.Handlers) -> None:
        for number in numbers:
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=lambda: set_all(signal.SIG_DFL))  # workers are ended by their parent
    atexit.register(set_all, signal.SIG_IGN)  # Python, while it ends, would die of one and lose its exit code


@contextmanager
def when_stopped(text: str) -> Iterator[None]:
    """Inside, a command that a signal ends says `text` of what is left, unless its ranks have said more."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(f"{stop}; {text}") from None
    except RankError as error:
        if error.exit_code != Stopped.exit_code or error.failure.signal == 0:
            raise
        raise Stopped(f"{error}; {text}") from None


@contextmanager
def forwarded_signals() -> Iterator[list[str]]:
    """Inside, what asks the command to stop is passed on to its ranks; gives the names of the signals received.

    They get SIGUSR1, which lets them save first. SIGTERM, which a later Ctrl-C or SIGTERM becomes, ends them at once: the
    agent too sends it, to the peers of a rank that failed. Before there is a rank the first one ends the command.
    """
    received: list[str] = []
    noted = 0.0

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal noted
        if received and not demands_immediate_end(number, noted):
            return
        noted = noted or time.monotonic()
        received.append(signal.Signals(number).name)
        ranks = [child for child in psutil.Process().children() if _is_started_rank(child)]
        if not ranks:
            raise Interrupted(received[0])
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR1 if len(received) == 1 else signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in heeded(ASK_TO_STOP)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_started_rank(child: psutil.Process) -> bool:
    """Also one that has ended; the parent has other children, such as multiprocessing's resource tracker."""
    with suppress(psutil.NoSuchProcess):
        return child.status() == psutil.STATUS_ZOMBIE or LAUNCHER_PID in child.environ()
    return False
