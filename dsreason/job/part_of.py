"""The type that identifies one of several equal parts."""

from __future__ import annotations

from typing import NamedTuple


class PartOf(NamedTuple):
    """One of several equal parts: `PartOf(1, 4)` is the second of four parts of a row's tokens, or of four groups of ranks."""

    number: int
    total: int


WHOLE = PartOf(0, 1)
