"""Time limits for calls into libraries that only limit the time between two bytes, not that of a whole request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

PACE_BYTES, PACE_S = 60_000, 60.0
"""A download of less than this many bytes in this many seconds counts as broken."""


def run_with_limit(limit: float, call: Callable[[], T]) -> T:
    """Return the call's result; raise TimeoutError after `limit` seconds.

    A call into a library cannot be interrupted: it continues in a thread that nobody waits for, not even at process exit.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  `result` raises it
            future.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    try:
        return future.result(limit)
    except TimeoutError:
        if future.done():  # the call itself raised it
            raise
        raise TimeoutError(f"no complete response within {limit:g} s") from None


class Pace:
    """The pace of a download whose size is unknown, so that no time limit fits."""

    def __init__(self) -> None:
        self.began, self.bytes = time.monotonic(), 0

    def count(self, num_bytes: int) -> None:
        """Count received bytes. Raise TimeoutError if there were too few for too long."""
        self.bytes += num_bytes
        now = time.monotonic()
        if now - self.began < PACE_S:
            return
        if self.bytes < PACE_BYTES:
            raise TimeoutError(f"only {self.bytes} bytes came in {now - self.began:.0f} s")
        self.began, self.bytes = now, 0
