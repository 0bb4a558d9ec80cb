"""Rewards for where and when: spans of time, boxes and points, one or several of them.

Several are paired so that the sum of their qualities is the largest (an optimal assignment), and the reward is
`2 · sum / (references + answers)`: F1 with qualities in place of hits, so that what is missed and what is too much both
cost. With one of each it is the quality itself. An answer in which nothing is read is worth 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from dsreason.data.types import Sample
from dsreason.rewards.options import NotNegative, Positive, Share, Worth
from dsreason.rewards.reading.plain import answer_of
from dsreason.rewards.reading.shapes import Order, Shape, boxes
from dsreason.rewards.reading.shapes import points as read_points
from dsreason.rewards.reading.times import Span, spans
from dsreason.rewards.reference import reference, unusable
from dsreason.text import normalized

Coordinates = Literal["pixels", "0-1000", "0-1"]
"""Of an image: pixels, or thousandths or parts of its width and height."""
RANGES = {"0-1000": 1000.0, "0-1": 1.0}
MOST_PAIRED = 1000
"""Answers that are paired; further ones only count as too many."""
SLACK = 1e-9

One = TypeVar("One")


def temporal_iou(
    completion: str,
    sample: Sample,
    *,
    threshold: Share | None = None,
    generalized: bool = False,
    metrics: bool = False,
) -> Worth:
    """Overlap of spans of time, 0 to 1: the length of the intersection over that of the union.

    Spans are read as people and models write them (`from 00:12 to 00:15`, `[12.0, 15.0]`, JSON, tags), in seconds; see
    `dsreason.rewards.reading.times`. One that ends before it starts overlaps with nothing. A reference of `[]` asks for
    an answer that there is none.

    Args:
        threshold: the reward is 1 where every reference has a span of its own with at least this overlap and none is left
            over, else 0.
        generalized: spans that do not overlap are worth the more the nearer they are (GIoU, mapped to 0 … 1).
        metrics: also return `read`, whether there was anything to read.
    """
    right = reference(sample, spans, "span of time; write [12.0, 15.0], or 00:12 to 00:15")
    if any(start >= end for start, end in right):
        raise unusable(sample, "with a span that does not end after its start")
    answer = spans(answer_of(completion))
    score = paired(right, answer, partial(overlap, generalized=generalized), threshold)
    return (score, {"read": float(answer is not None)}) if metrics else score


def box_iou(
    completion: str,
    sample: Sample,
    *,
    threshold: Share | None = None,
    generalized: bool = False,
    labels: bool = False,
    order: Order = "xyxy",
    coordinates: Coordinates = "pixels",
    answer_coordinates: Coordinates | None = None,
    metrics: bool = False,
) -> Worth:
    """Overlap of boxes, 0 to 1: the area of the intersection over that of the union.

    Boxes are read in JSON (`{"bbox_2d": [x1, y1, x2, y2], "label": "cup"}`), tags and brackets, see
    `dsreason.rewards.reading.shapes`. One whose corners are in the wrong order overlaps with nothing.

    Args:
        threshold, generalized, metrics: as of `temporal_iou`.
        labels: boxes are paired only where their labels are the same, case aside.
        order: of the four numbers, in answers and references.
        coordinates: of the reference.
        answer_coordinates: of answers, where they differ; between pixels and others the row needs `width` and `height`.
    """
    right = reference(sample, partial(boxes, order=order), "box; write [x1, y1, x2, y2]")
    check_range(sample, right, coordinates)
    if any(box.numbers[0] >= box.numbers[2] or box.numbers[1] >= box.numbers[3] for box in right):
        raise unusable(sample, f"with a box without width or height; are its numbers {order}?")
    answer = in_reference_units(
        boxes(answer_of(completion), order), sample, answer_coordinates or coordinates, coordinates
    )
    quality = partial(box_quality, generalized=generalized, labels=labels)
    score = paired(right, answer, quality, threshold)
    return (score, {"read": float(answer is not None)}) if metrics else score


def points(
    completion: str,
    sample: Sample,
    *,
    limit: Positive | None = None,
    score: Literal["linear", "exp"] = "linear",
    threshold: NotNegative | None = None,
    labels: bool = False,
    coordinates: Coordinates = "0-1000",
    answer_coordinates: Coordinates | None = None,
    metrics: bool = False,
) -> Worth:
    """Nearness of points, 0 to 1: 1 - distance / `limit`, not below 0; distances are Euclidean.

    Points are read in JSON (`{"point_2d": [x, y], "label": "cup"}`), tags and brackets. A reference may also be a box: any
    point in it is right, and others are as far away as the box is.

    Args:
        limit: from which distance on a point is worth nothing, in the reference's units; a tenth of the range (100 of
            1,000) where it is not given, of pixels a tenth of the image's longer side.
        score: `exp` is exp(-distance / limit) instead.
        threshold: the reward is 1 where every reference has a point of its own at most this far away and none is left
            over, else 0.
        labels, coordinates, answer_coordinates, metrics: as of `box_iou`.
    """
    right = reference(sample, lambda text: read_points(text) or boxes(text) or read_points(text), "point; write [x, y]")
    check_range(sample, right, coordinates)
    if limit is None:
        limit = 0.1 * (RANGES[coordinates] if coordinates in RANGES else max(image_size(sample)))
    answer = in_reference_units(
        read_points(answer_of(completion)), sample, answer_coordinates or coordinates, coordinates
    )

    def quality(one: Shape, other: Shape) -> float:
        if labels and not same_label(one, other):
            return 0.0
        far = distance(one, other)
        return float(far <= threshold + SLACK) if threshold is not None else nearness(far, limit, score)

    worth = paired(right, answer, quality, None if threshold is None else 1.0)
    return (worth, {"read": float(answer is not None)}) if metrics else worth


# ---------------------------------------------------------------- pairing


def paired(
    right: Sequence[One],
    given: Sequence[One] | None,
    quality: Callable[[One, One], float],
    threshold: float | None = None,
) -> float:
    """`2 · sum / (references + answers)` over the best pairs; with a threshold whether all are paired and reach it."""
    if given is None or not right or not given:
        return float(given is not None and not right and not given)
    table = [[quality(reference, other) for other in given[:MOST_PAIRED]] for reference in right]
    if threshold is None:
        return 2 * best_sum(table) / (len(right) + len(given))
    reached = [[float(value >= threshold - SLACK) for value in row] for row in table]
    return float(len(right) == len(given) and best_sum(reached) == len(right))


def best_sum(table: Sequence[Sequence[float]]) -> float:
    """The largest sum of entries no two of which share a row or column."""
    if len(table) == 1 or len(table[0]) == 1:
        return max(max(row) for row in table)
    import numpy as np
    from scipy.optimize import linear_sum_assignment  # takes a third of a second

    values = np.array(table)
    return float(values[linear_sum_assignment(values, maximize=True)].sum())


# ---------------------------------------------------------------- qualities


def overlap(one: Span, other: Span, *, generalized: bool = False) -> float:
    """IoU of two spans; with `generalized` (GIoU + 1) / 2. 0 for one that does not end after its start."""
    if one[0] >= one[1] or other[0] >= other[1]:
        return 0.0
    shared = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    union = (one[1] - one[0]) + (other[1] - other[0]) - shared
    hull = max(one[1], other[1]) - min(one[0], other[0])
    return (shared / union + union / hull) / 2 if generalized else shared / union


def box_quality(one: Shape, other: Shape, *, generalized: bool, labels: bool) -> float:
    """IoU of two boxes (x1, y1, x2, y2); with `generalized` (GIoU + 1) / 2, of Rezatofighi et al. 2019."""
    if labels and not same_label(one, other):
        return 0.0
    (ax, ay, bx, by), (cx, cy, dx, dy) = one.numbers, other.numbers
    if ax >= bx or ay >= by or cx >= dx or cy >= dy:
        return 0.0
    shared = max(0.0, min(bx, dx) - max(ax, cx)) * max(0.0, min(by, dy) - max(ay, cy))
    union = (bx - ax) * (by - ay) + (dx - cx) * (dy - cy) - shared
    hull = (max(bx, dx) - min(ax, cx)) * (max(by, dy) - min(ay, cy))
    return (shared / union + union / hull) / 2 if generalized else shared / union


def same_label(one: Shape, other: Shape) -> bool:
    return normalized(one.label) == normalized(other.label)


def distance(right: Shape, given: Shape) -> float:
    """From a point to a point, or to the nearest place in a box."""
    x, y = given.numbers[:2]
    left_edge, top, *corner = right.numbers
    far_x, far_y = corner if len(corner) == 2 else (left_edge, top)
    return math.hypot(max(left_edge - x, 0.0, x - far_x), max(top - y, 0.0, y - far_y))


def nearness(far: float, limit: float, score: Literal["linear", "exp"]) -> float:
    return math.exp(-far / limit) if score == "exp" else max(0.0, 1.0 - far / limit)


# ---------------------------------------------------------------- coordinates


def check_range(sample: Sample, shapes: Sequence[Shape], coordinates: Coordinates) -> None:
    """Raise DataError if a reference's numbers cannot be what the option says."""
    numbers = [value for shape in shapes for value in shape.numbers]
    largest = RANGES.get(coordinates, math.inf)
    if any(value > largest or (value < 0 and largest < math.inf) for value in numbers):
        raise unusable(sample, f'outside {coordinates}; set the reward\'s option coordinates = "pixels", or another')
    if coordinates == "0-1000" and any(0 < value < 1 for value in numbers) and max(numbers) <= 1:
        raise unusable(sample, 'all within 0 to 1; set the reward\'s option coordinates = "0-1"')


def in_reference_units(
    given: list[Shape] | None, sample: Sample, of_answer: Coordinates, of_reference: Coordinates
) -> list[Shape] | None:
    if of_answer == of_reference:
        return given
    sizes = {
        name: image_size(sample) if name == "pixels" else (RANGES[name],) * 2 for name in (of_answer, of_reference)
    }
    (ax, ay), (rx, ry) = sizes[of_answer], sizes[of_reference]
    return None if given is None else [shape.scaled(rx / ax, ry / ay) for shape in given]


def image_size(sample: Sample) -> tuple[float, float]:
    """The row's `width` and `height`, in pixels."""
    size = sample.meta.get("width"), sample.meta.get("height")
    if not all(isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6 for value in size):
        raise unusable(
            sample,
            f"in pixels, and the row's width and height are {size[0]!r} and {size[1]!r}; add them, or set the reward's "
            "options coordinates and limit so that none are needed",
        )
    return float(size[0] or 0), float(size[1] or 0)
