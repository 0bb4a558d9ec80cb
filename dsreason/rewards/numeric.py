"""A reward for numbers, such as distances, counts, speeds and percentages."""

from __future__ import annotations

from typing import Literal

from dsreason.data.types import Sample
from dsreason.rewards.options import NotNegative, RewardValue
from dsreason.rewards.reading.numbers import FACTORS, Quantity, read_quantity
from dsreason.rewards.reading.plain import get_answer
from dsreason.rewards.reading.reference import read_reference

# fmt: off
Unit = Literal[
    "mm", "cm", "m", "km", "in", "ft", "mi", "ms", "s", "min", "h", "m/s", "km/h", "mph", "g", "kg", "lb", "deg", "rad", "%"
]
# fmt: on
MRA_LEVELS = [0.5 + 0.05 * step for step in range(10)]
"""Confidence levels for VSI-Bench's mean relative accuracy: 0.5, 0.55 … 0.95."""
SLACK = 1e-9
"""Relative rounding error allowed when units are converted, such as 320 cm to 3.2 m."""


def numeric(
    completion: str,
    sample: Sample,
    *,
    absolute: NotNegative = 0.0,
    relative: NotNegative = 0.0,
    score: Literal["within", "relative", "mra"] = "within",
    unit: Unit | None = None,
    metrics: bool = False,
) -> RewardValue:
    """Return 1 if the answer's number equals the reference's within a tolerance; otherwise, the result depends on `score`.

    Thousands separators, percent signs, fractions, powers of ten and number words are supported; see
    `dsreason.rewards.reading.numbers`. If both numbers have a unit, units are converted (`320 cm` equals `3.2 m`), and different
    dimensions are wrong; if either has none, units are ignored. `12 %` equals both 12 and 0.12 if the other number has no percent
    sign. A range scores 0, and so do several numbers if none of them is clearly the answer.

    Args:
        absolute, relative: the tolerance is the larger of `absolute`, in the reference's unit, and `relative` times the
            reference.
        score: beyond the tolerance, `within` gives 0; `relative` gives 1 - error / reference, at least 0; and `mra` gives
            VSI-Bench's mean relative accuracy, the share of the levels 0.5, 0.55 … 0.95 with error / reference < 1 - level.
        unit: unit to assume for numbers without one, in answers as well as references.
        metrics: also return `read` (whether a number was parsed) and, if so, `error` in the reference's unit.
    """
    right = add_unit(read_reference(sample, read_quantity, "single number"), unit)
    answer = read_quantity(get_answer(completion), right.dimension)
    error = None if answer is None else compute_difference(right, add_unit(answer, unit))
    reward = (
        0.0
        if error is None
        else compute_closeness(error, abs(right.value), max(absolute, relative * abs(right.value)), score)
    )
    if not metrics:
        return reward
    return reward, {"read": float(answer is not None)} | ({} if error is None else {"error": error})


def add_unit(number: Quantity, unit: str | None) -> Quantity:
    """Return the quantity, with `unit` added if it has no unit."""
    return number if unit is None or number.dimension else Quantity(number.value, *FACTORS[unit])


def compute_difference(right: Quantity, answer: Quantity) -> float | None:
    """Return the error in the reference's unit, or None if the two quantities have different dimensions."""
    if right.dimension == answer.dimension:
        return abs(answer.base - right.base) / right.factor
    if right.dimension and answer.dimension:
        return None
    plain = abs(answer.value - right.value)
    if right.dimension == "share":
        return min(plain, abs(100 * answer.value - right.value))
    return min(plain, abs(answer.value / 100 - right.value)) if answer.dimension == "share" else plain


def compute_closeness(error: float, size: float, tolerance: float, score: str) -> float:
    """Map an error to a score, 0 to 1; `size` is the reference's absolute value."""
    if error <= tolerance + SLACK * size:
        return 1.0
    if score == "within" or not size:
        return 0.0
    if score == "relative":
        return max(0.0, 1.0 - error / size)
    return sum(error / size < 1.0 - level for level in MRA_LEVELS) / len(MRA_LEVELS)
