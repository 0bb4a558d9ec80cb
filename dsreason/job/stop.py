"""Stop requests: signals upon which the job finishes its current step, saves a checkpoint and ends."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType
from typing import Any, Self

from dsreason.job.launch import is_started_by_us
from dsreason.job.ranks import gather_objects
from dsreason.job.signals import ASK_TO_STOP, select_not_ignored, should_end_at_once

log = logging.getLogger(__name__)


class StopRequest:
    """A context manager that records the first stop signal for the training loop; a later one takes effect immediately.

    Ranks of dsreason's launcher handle only SIGUSR1, because the launcher forwards the first signal as SIGUSR1, and a SIGTERM
    may mean that a peer has failed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.first_time = 0.0
        """Monotonic time of the first signal, in seconds."""
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = ASK_TO_STOP[:1] if is_started_by_us() else select_not_ignored(ASK_TO_STOP)
        self.before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self.first_time = signal.Signals(number).name, time.monotonic()
        elif should_end_at_once(number, self.first_time):
            signal.signal(number, self.before[number])
            signal.raise_signal(number)

    def asked(self) -> str:
        """Return the name of a stop signal that any rank has received; "" if there was none. Collective."""
        name = next(filter(None, gather_objects(self.name)), "")
        if name:
            log.warning("%s: stopping after this step", name)
        return name
