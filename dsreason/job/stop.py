"""Stopping well: a signal asks the job to save a checkpoint at the next step and end."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType
from typing import Any, Self

from dsreason.job.launch import started_by_us
from dsreason.job.ranks import gather_objects
from dsreason.job.signals import ASK_TO_STOP, demands_immediate_end, heeded

log = logging.getLogger(__name__)


class StopRequest:
    """Inside, the first signal is noted and training goes on to its next step; a later Ctrl-C or SIGTERM acts at once.

    Our own launcher passes all of them on as SIGUSR1, and SIGTERM then means that a peer has failed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.noted = 0.0
        """On the monotonic clock."""
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = ASK_TO_STOP[:1] if started_by_us() else heeded(ASK_TO_STOP)
        self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self.noted = signal.Signals(number).name, time.monotonic()
        elif demands_immediate_end(number, self.noted):
            signal.signal(number, self.before[number])
            signal.raise_signal(number)

    def asked(self) -> str:
        """The signal that any rank got, or "". Collective."""
        name = next(filter(None, gather_objects(self.name)), "")
        if name:
            log.warning("%s: stopping after this step", name)
        return name
