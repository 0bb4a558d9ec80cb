"""Stop requests: a signal makes the job save a checkpoint at the next step and end."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType
from typing import Any, Self

from dsreason.job.launch import is_started_by_us
from dsreason.job.ranks import gather_objects
from dsreason.job.signals import ASK_TO_STOP, select_heeded, should_end_at_once

log = logging.getLogger(__name__)


class StopRequest:
    """A context that records the first signal while training goes on to its next step; a later Ctrl-C or SIGTERM acts at once.

    Our own launcher forwards the first signal as SIGUSR1, and SIGTERM then may mean that a peer has failed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.noted = 0.0
        """Monotonic time of the first signal."""
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = ASK_TO_STOP[:1] if is_started_by_us() else select_heeded(ASK_TO_STOP)
        self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self.noted = signal.Signals(number).name, time.monotonic()
        elif should_end_at_once(number, self.noted):
            signal.signal(number, self.before[number])
            signal.raise_signal(number)

    def asked(self) -> str:
        """Return the name of the signal that any rank received, or "". Collective."""
        name = next(filter(None, gather_objects(self.name)), "")
        if name:
            log.warning("%s: stopping after this step", name)
        return name
