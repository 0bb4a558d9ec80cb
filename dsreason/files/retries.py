"""Retries for actions that fail for transient reasons."""

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
"""Number of attempts per request; the waits between them add up to about half a minute."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


def run_with_retries(action: Callable[[], T], attempts: int | None = None) -> T:
    """Call `action` and return its result. After a transient StorageError, wait and call it again.

    The wait doubles each time. It is multiplied by a random factor from 0.5 to 1, so that many ranks do not retry at once.

    Args:
        attempts: maximum number of calls; None means ATTEMPTS.
    """
    attempts = attempts or ATTEMPTS
    for attempt in range(1, attempts):
        try:
            return action()
        except StorageError as error:
            if not error.transient:
                raise
            wait = min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S) * random.uniform(0.5, 1)
            log.warning("%s; retrying in %.1f s (retry %d of %d)", error, wait, attempt, attempts - 1)
        time.sleep(wait)
    return action()
