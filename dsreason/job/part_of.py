"""One of several equal parts."""

from __future__ import annotations

from typing import NamedTuple


class PartOf(NamedTuple):
    """A part such as `PartOf(1, 4)`, the second of four: of a row's tokens, or of the groups of ranks that compute rows."""

    number: int
    total: int


WHOLE = PartOf(0, 1)
