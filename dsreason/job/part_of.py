"""The type that identifies one of several equal parts."""

from __future__ import annotations

from typing import NamedTuple


class PartOf(NamedTuple):
    """One of several equal parts: `PartOf(1, 4)` is the second of four, such as a quarter of a row's tokens or of the ranks."""

    number: int
    total: int


WHOLE = PartOf(0, 1)
