"""A reward for numbers: distances, counts, speeds, percentages."""

from __future__ import annotations

from typing import Literal

from dsreason.data.types import Sample
from dsreason.rewards.options import NotNegative, Worth
from dsreason.rewards.reading.numbers import FACTORS, Quantity, quantity
from dsreason.rewards.reading.plain import answer_of
from dsreason.rewards.reference import reference

# fmt: off
Unit = Literal[
    "mm", "cm", "m", "km", "in", "ft", "mi", "ms", "s", "min", "h", "m/s", "km/h", "mph", "g", "kg", "lb", "deg", "rad", "%"
]
# fmt: on
MRA_LEVELS = [0.5 + 0.05 * step for step in range(10)]
"""Of VSI-Bench: 0.5, 0.55 … 0.95."""
SLACK = 1e-9
"""Relative error of converting units: 320 cm are 3.2 m."""


def numeric(
    completion: str,
    sample: Sample,
    *,
    absolute: NotNegative = 0.0,
    relative: NotNegative = 0.0,
    score: Literal["within", "relative", "mra"] = "within",
    unit: Unit | None = None,
    metrics: bool = False,
) -> Worth:
    """1 where the answer's number is the reference's, within a tolerance.

    Read are thousands separators, percent, fractions, powers of ten and number words, see `dsreason.rewards.reading.numbers`.
    Units are converted where both are known (`320 cm` is `3.2 m`) and left out where one side has none; another dimension
    is wrong. `12 %` is both 12 and 0.12 where the other side has no sign. Several numbers none of which is clearly the
    answer, and ranges, are not read and worth 0.

    Args:
        absolute, relative: the error may be as large as the larger of `absolute`, in the reference's unit, and `relative`
            times the reference.
        score: beyond the tolerance `within` gives 0, `relative` 1 - error / reference, not below 0, and `mra` VSI-Bench's
            mean relative accuracy: the share of the levels 0.5, 0.55 … 0.95 with error / reference < 1 - level.
        unit: of numbers without one, in answers and references.
        metrics: also return `read` and, where a number was read, `error` in the reference's unit.
    """
    right = with_unit(reference(sample, quantity, "single number"), unit)
    read = quantity(answer_of(completion), right.dimension)
    error = None if read is None else difference(right, with_unit(read, unit))
    worth = (
        0.0 if error is None else closeness(error, abs(right.value), max(absolute, relative * abs(right.value)), score)
    )
    if not metrics:
        return worth
    return worth, {"read": float(read is not None)} | ({} if error is None else {"error": error})


def with_unit(found: Quantity, unit: str | None) -> Quantity:
    return found if unit is None or found.dimension else Quantity(found.value, *FACTORS[unit])


def difference(right: Quantity, given: Quantity) -> float | None:
    """In the reference's unit; None if the two have different dimensions."""
    if right.dimension == given.dimension:
        return abs(given.base - right.base) / right.factor
    if right.dimension and given.dimension:
        return None
    plain = abs(given.value - right.value)
    if right.dimension == "share":
        return min(plain, abs(100 * given.value - right.value))
    return min(plain, abs(given.value / 100 - right.value)) if given.dimension == "share" else plain


def closeness(error: float, size: float, tolerance: float, score: str) -> float:
    if error <= tolerance + SLACK * size:
        return 1.0
    if score == "within" or not size:
        return 0.0
    if score == "relative":
        return max(0.0, 1.0 - error / size)
    return sum(error / size < 1.0 - level for level in MRA_LEVELS) / len(MRA_LEVELS)
