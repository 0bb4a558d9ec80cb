"""Requests to stop this process, and waits that end as soon as such a request arrives.

A signal can only be handled between two steps of a run, but a step may wait for minutes for a server, a worker process or a data
worker. Such waits therefore check for a request several times per second.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TypeVar

from dsreason.errors import Stopped

T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two checks for a request to stop."""

_requests: list[str] = []
"""Names of the signals that asked this process to stop. It is a list because signal handlers must not acquire locks."""


def request_stop(name: str) -> None:
    """Record that a signal with this name asks the process to stop; only the first request counts."""
    _requests.append(name)


def get_stop_signal() -> str:
    """Return the name of the signal that asked this process, or another rank of its job, to stop; "" if none did."""
    return _requests[0] if _requests else ""


def forget_stop() -> None:
    _requests.clear()


def check_stop() -> None:
    """Raise Stopped if this process has been asked to stop."""
    if name := get_stop_signal():
        raise Stopped(f"stopped by {name}")


def wait_for_result(future: Future[T]) -> T:
    """Return the result of `future`, or raise its error; raise Stopped if this process is asked to stop first."""
    while True:
        try:
            return future.result(POLL_S)
        except TimeoutError:
            if future.done():  # the call itself raised the TimeoutError
                raise
            check_stop()


def pause(seconds: float, cancelled: threading.Event | None = None) -> bool:
    """Wait for `seconds`. Return early with True if `cancelled` is set; raise Stopped if this process is asked to stop."""
    deadline, over = time.monotonic() + seconds, cancelled or threading.Event()
    while (seconds_left := deadline - time.monotonic()) > 0:
        check_stop()
        if over.wait(min(seconds_left, POLL_S)):
            return True
    return over.is_set()
