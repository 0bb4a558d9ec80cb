"""Retries: transient refusals are waited out, others are raised."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from dsreason.errors import StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 6
"""Of one request; with the waits between them about half a minute."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


def with_retries(action: Callable[[], T], attempts: int | None = None) -> T:
    """Return what `action` returns. After a transient StorageError it is called again, `attempts` times (None: ATTEMPTS).

    The waits double, and each is cut at random to between half of it and all, so that many ranks do not retry at once.
    """
    attempts = attempts or ATTEMPTS
    for attempt in range(1, attempts):
        try:
            return action()
        except StorageError as error:
            if not error.transient:
                raise
            wait = min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S) * random.uniform(0.5, 1)
            log.warning("%s; trying again in %.1f s (%d of %d)", error, wait, attempt, attempts - 1)
        time.sleep(wait)
    return action()
