"""Time limits for calls to libraries that limit only the time between two bytes, not the total duration of a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

PACE_BYTES, PACE_S = 60_000, 60.0
"""Minimum speed of a download: `PACE_BYTES` bytes in `PACE_S` seconds. A slower download counts as broken."""


def run_with_limit(limit: float, call: Callable[[], T]) -> T:
    """Run `call` and return its result; raise TimeoutError after `limit` seconds.

    A library call cannot be interrupted. After a timeout, it continues in a daemon thread, which does not delay process exit.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  re-raised by `future.result`
            future.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    try:
        return future.result(limit)
    except TimeoutError:
        if future.done():  # the call itself raised the TimeoutError
            raise
        raise TimeoutError(f"no complete response within {limit:g} s") from None


class Pace:
    """A speed check for a download of unknown size, for which no total time limit can be set."""

    def __init__(self) -> None:
        self.began, self.bytes = time.monotonic(), 0

    def count(self, num_bytes: int) -> None:
        """Count received bytes; raise TimeoutError if fewer than `PACE_BYTES` have arrived in the last `PACE_S` seconds."""
        self.bytes += num_bytes
        now = time.monotonic()
        if now - self.began < PACE_S:
            return
        if self.bytes < PACE_BYTES:
            raise TimeoutError(f"only {self.bytes} bytes arrived in {now - self.began:.0f} s")
        self.began, self.bytes = now, 0
