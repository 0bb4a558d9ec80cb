"""Line charts as SVG, with axes; they need no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 340, 190
"""Size of a chart in SVG user units."""
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 24
"""Margins around the plot area."""
MOST_POINTS = 300
"""Maximum number of points per line. A line with more points shows means over consecutive steps."""
MOST_TICKS = 4

Points = Sequence[tuple[float, float]]
"""Pairs (step, value), sorted by step."""


@dataclass(frozen=True)
class Line:
    """A line in a chart. Validation values are few, so they are also marked with dots."""

    label: str
    points: Points
    has_dots: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    """Unit of the values, such as `tokens`; empty for numbers without a unit."""
    lines: Sequence[Line]


@dataclass(frozen=True)
class DrawnLine:
    """A line in SVG coordinates; `path` is the `points` attribute of a polyline."""

    label: str
    path: str
    dots: Sequence[tuple[float, float]]
    last: str


@dataclass(frozen=True)
class Tick:
    position: float
    text: str


@dataclass(frozen=True)
class DrawnChart:
    """A chart in SVG coordinates."""

    title: str
    unit: str
    lines: Sequence[DrawnLine]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    description: str
    """Description of the chart in words, for screen readers."""
    steps_per_point: int


def draw_chart(chart: Chart) -> DrawnChart | None:
    """Compute a chart's coordinates; return None if none of its lines has a point."""
    lines = [line for line in chart.lines if line.points]
    if not lines:
        return None
    steps_per_point = max(math.ceil(len(line.points) / MOST_POINTS) for line in lines)
    shortened = [average_points(line.points, math.ceil(len(line.points) / MOST_POINTS)) for line in lines]
    steps = [step for points in shortened for step, _ in points]
    values = [value for points in shortened for _, value in points]
    first, last = min(steps), max(steps)
    low, high = widen(min(values), max(values))

    def locate(step: float, value: float) -> tuple[float, float]:
        x = (step - first) / (last - first) if last > first else 0.5
        y = (value - low) / (high - low)
        return round(LEFT + x * (WIDTH - LEFT - RIGHT), 1), round(TOP + (1 - y) * (HEIGHT - TOP - BOTTOM), 1)

    drawn = []
    for line, points in zip(lines, shortened, strict=True):
        places = [locate(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in places)
        is_dotted = line.has_dots or len(places) == 1
        drawn.append(DrawnLine(line.label, path, places if is_dotted else (), format_value(line.points[-1][1])))
    return DrawnChart(
        title=chart.title,
        unit=chart.unit,
        lines=drawn,
        x_ticks=[Tick(locate(step, low)[0], f"{step:g}") for step in choose_ticks(first, last, whole=True)],
        y_ticks=[Tick(locate(first, value)[1], format_value(value)) for value in choose_ticks(low, high)],
        description=describe_chart(chart.title, lines),
        steps_per_point=steps_per_point,
    )


def describe_chart(title: str, lines: Sequence[Line]) -> str:
    """Describe each line by its first and last value. Example: `loss: training from 6.35 (step 1) to 0.12 (step 640)`."""
    parts = [
        f"{line.label} from {format_value(line.points[0][1])} (step {line.points[0][0]:g}) "
        f"to {format_value(line.points[-1][1])} (step {line.points[-1][0]:g})"
        for line in lines
    ]
    return f"{title}: {'; '.join(parts)}"


def average_points(points: Points, size: int) -> Points:
    """Replace every `size` consecutive points with their mean."""
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]


def widen(low: float, high: float) -> tuple[float, float]:
    """Return the range for an axis: slightly wider than `low` to `high`, and never empty."""
    margin = 0.04 * (high - low) or 0.5 * abs(low) or 0.5
    return low - margin, high + margin


def choose_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return at most `MOST_TICKS` + 1 round values (1, 2 or 5 times a power of ten apart) between `low` and `high`."""
    if high <= low:
        return [low]
    raw = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        distance = max(1.0, distance)
    start, end = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [round(number * distance, 12) for number in range(start, end + 1)]


def format_value(value: float) -> str:
    """Format a value with three significant digits: `0.812`, `12,300` or `1.2e-05`."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
