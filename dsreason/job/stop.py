"""Stop requests: signals that make the job finish or abandon its current step, save a checkpoint and end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any, Self

from dsreason.job.launch import is_started_by_us
from dsreason.job.lifeline import Lifeline
from dsreason.job.ranks import gather_objects
from dsreason.job.signals import ASK_TO_STOP, select_not_ignored, should_end_at_once
from dsreason.stopping import forget_stop, get_stop_signal, request_stop

log = logging.getLogger(__name__)


class StopRequest:
    """A context manager that records the first stop signal for the training loop; a later one takes effect immediately.

    The current step is finished, but waiting for servers, reward workers or data workers ends at once; see `dsreason.stopping`.
    Python runs signal handlers only in the main thread, and not while that thread is blocked in a collective because another
    rank waits for a server. A separate thread therefore reads the signals from Python's wakeup socket, and the lifeline passes
    them on to all ranks.

    Ranks started by dsreason's launcher handle only SIGUSR1, because the launcher forwards the first signal as SIGUSR1, and a
    SIGTERM may mean that a peer has failed.
    """

    def __init__(self) -> None:
        self.first_time = 0.0
        """Monotonic time, in seconds, of the first signal to this rank; 0 if there was none."""
        self.before: dict[int, Any] = {}
        self._lifeline: Lifeline | None = None
        self._wakeup, self._signals = socket.socketpair()

    @property
    def name(self) -> str:
        """Name of the first stop signal that this rank has received, directly or from another rank; "" if there was none."""
        return get_stop_signal()

    def __enter__(self) -> Self:
        forget_stop()
        numbers = ASK_TO_STOP[:1] if is_started_by_us() else select_not_ignored(ASK_TO_STOP)
        self.before = {number: signal.signal(number, self._note) for number in numbers}
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        self._wakeup.close()  # ends the thread
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def share(self, lifeline: Lifeline) -> None:
        """Pass stop signals on to the other ranks through `lifeline`."""
        self._lifeline = lifeline
        if self.name:
            lifeline.report_stop(self.name)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.first_time:
            self.first_time = time.monotonic()
            request_stop(signal.Signals(number).name)
        elif should_end_at_once(number, self.first_time):
            signal.signal(number, self.before[number])
            signal.raise_signal(number)

    def _listen(self) -> None:
        with self._signals:
            while numbers := self._signals.recv(64):
                for number in numbers:
                    if number in self.before:
                        request_stop(signal.Signals(number).name)
                        if self._lifeline is not None:
                            self._lifeline.report_stop(self.name)

    def _close_in_child(self) -> None:
        """Detach a forked child, so that signals to a data worker do not stop the job."""
        if signal.set_wakeup_fd(-1) != self._wakeup.fileno():
            return
        self._wakeup.close()
        self._signals.close()

    def asked(self) -> str:
        """Return the name of a stop signal that any rank has received; "" if there was none. Collective."""
        name = next(filter(None, gather_objects(self.name)), "")
        if name:
            log.warning("%s: stopping after this step", name)
        return name
