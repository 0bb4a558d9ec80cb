"""A limit on the time of calls into libraries that have none for a whole request, only for the time between two bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

PACE_BYTES, PACE_S = 60_000, 60.0
"""A download that brings less in this time counts as broken."""


def within(limit: float, call: Callable[[], T]) -> T:
    """The call's result; TimeoutError after `limit` seconds.

    Nothing can end a call into a library: it then goes on in a thread that no one waits for, not even the process's end.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    try:
        return future.result(limit)
    except TimeoutError:
        if future.done():  # the call's own
            raise
        raise TimeoutError(f"no whole answer within {limit:g} s") from None


class Pace:
    """Of a download of any size, which no time limit fits."""

    def __init__(self) -> None:
        self.began, self.bytes = time.monotonic(), 0

    def count(self, num_bytes: int) -> None:
        """So many bytes came. TimeoutError if it was too few for too long."""
        self.bytes += num_bytes
        now = time.monotonic()
        if now - self.began < PACE_S:
            return
        if self.bytes < PACE_BYTES:
            raise TimeoutError(f"only {self.bytes} bytes came in {now - self.began:.0f} s")
        self.began, self.bytes = now, 0
