"""Rewards for localisation in space and time: one or more time spans, boxes or points.

If there are several, answers are paired with references so that the sum of the pairs' qualities is maximal (an optimal
assignment). The reward is `2 · sum / (references + answers)`, an F1 score with qualities instead of hits, so both missing and
superfluous answers reduce it. With one reference and one answer, the reward is the quality itself. An answer that cannot be
parsed scores 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from dsreason.data.types import Sample
from dsreason.rewards.options import NotNegative, Positive, RewardValue, Share
from dsreason.rewards.reading.plain import get_answer
from dsreason.rewards.reading.reference import build_data_error, read_reference
from dsreason.rewards.reading.shapes import Order, PlaneShape, read_boxes
from dsreason.rewards.reading.shapes import read_points as read_points
from dsreason.rewards.reading.times import Span, read_spans
from dsreason.text import normalize

Coordinates = Literal["pixels", "0-1000", "0-1"]
"""Unit of image coordinates: pixels, or thousandths or fractions of the width and height of the image."""
RANGES = {"0-1000": 1000.0, "0-1": 1.0}
MOST_PAIRED = 1000
"""Maximum number of spans, boxes or points per answer that are paired; any more only count as superfluous."""
SLACK = 1e-9

Item = TypeVar("Item")


def temporal_iou(
    completion: str,
    sample: Sample,
    *,
    threshold: Share | None = None,
    generalized: bool = False,
    metrics: bool = False,
) -> RewardValue:
    """Return the overlap of time spans, 0 to 1: the length of their intersection divided by the length of their union.

    Spans are parsed in the forms that people and models write (`from 00:12 to 00:15`, `[12.0, 15.0]`, JSON, tags), in seconds;
    see `dsreason.rewards.reading.times`. A span that ends before it starts has no overlap. If the reference is `[]`, the
    answer must state that no span exists.

    Args:
        threshold: return 1 if every reference is paired with a separate span that overlaps it by at least this much and no span
            is left over, else 0.
        generalized: give spans that do not overlap a higher score the closer they are (GIoU, mapped to 0 … 1).
        metrics: also return `read`, whether the answer could be parsed.
    """
    right = read_reference(sample, read_spans, "span of time; write [12.0, 15.0], or 00:12 to 00:15")
    if any(start >= end for start, end in right):
        raise build_data_error(sample, "has a span that does not end after its start")
    answer = read_spans(get_answer(completion))
    score = score_pairs(right, answer, partial(compute_overlap, generalized=generalized), threshold)
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
) -> RewardValue:
    """Return the overlap of boxes, 0 to 1: the area of their intersection divided by the area of their union.

    Boxes are parsed from JSON (`{"bbox_2d": [x1, y1, x2, y2], "label": "cup"}`), tags and brackets; see
    `dsreason.rewards.reading.shapes`. A box whose corners are in the wrong order has no overlap.

    Args:
        threshold, generalized, metrics: same as for `temporal_iou`.
        labels: pair boxes only if their labels are equal, ignoring case.
        order: meaning of a box's four numbers, in answers as well as references.
        coordinates: unit in references.
        answer_coordinates: unit in answers, if different; converting from or to pixels requires `width` and `height` in the row.
    """
    right = read_reference(sample, partial(read_boxes, order=order), "box; write [x1, y1, x2, y2]")
    check_range(sample, right, coordinates)
    if any(box.numbers[0] >= box.numbers[2] or box.numbers[1] >= box.numbers[3] for box in right):
        raise build_data_error(
            sample, f"has a box without width or height; check that its numbers are in the order {order}"
        )
    answer = convert_to_reference_units(
        read_boxes(get_answer(completion), order), sample, answer_coordinates or coordinates, coordinates
    )
    quality = partial(compute_box_quality, generalized=generalized, labels=labels)
    score = score_pairs(right, answer, quality, threshold)
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
) -> RewardValue:
    """Return the closeness of points, 0 to 1: 1 - distance / `limit`, at least 0; distances are Euclidean.

    Points are parsed from JSON (`{"point_2d": [x, y], "label": "cup"}`), tags and brackets. A reference may also be a box: any
    point inside it is correct, and the distance of a point outside is measured to the box.

    Args:
        limit: distance at which the score reaches 0, in the reference's unit. The default is a tenth of the range (100 for a
            range of 1,000) or, for pixels, a tenth of the image's longer side.
        score: `linear` as described above; `exp` uses exp(-distance / limit).
        threshold: return 1 if every reference is paired with a separate point within this distance and no point is left over,
            else 0.
        labels, coordinates, answer_coordinates, metrics: same as for `box_iou`.
    """
    right = read_reference(
        sample, lambda text: read_points(text) or read_boxes(text) or read_points(text), "point; write [x, y]"
    )
    check_range(sample, right, coordinates)
    if limit is None:
        limit = 0.1 * (RANGES[coordinates] if coordinates in RANGES else max(get_image_size(sample)))
    answer = convert_to_reference_units(
        read_points(get_answer(completion)), sample, answer_coordinates or coordinates, coordinates
    )

    def score_pair(right_shape: PlaneShape, point: PlaneShape) -> float:
        if labels and not has_same_label(right_shape, point):
            return 0.0
        far = compute_distance(right_shape, point)
        return float(far <= threshold + SLACK) if threshold is not None else compute_nearness(far, limit, score)

    reward = score_pairs(right, answer, score_pair, None if threshold is None else 1.0)
    return (reward, {"read": float(answer is not None)}) if metrics else reward


# ---------------------------------------------------------------- pairing


def score_pairs(
    right: Sequence[Item],
    answers: Sequence[Item] | None,
    quality: Callable[[Item, Item], float],
    threshold: float | None = None,
) -> float:
    """Return `2 · sum / (references + answers)`, with the sum over the pairs of the best pairing.

    With a threshold, return 1 if all references and answers are paired and every pair reaches the threshold, else 0.
    """
    if answers is None or not right or not answers:
        return float(answers is not None and not right and not answers)
    table = [[quality(right_item, answer) for answer in answers[:MOST_PAIRED]] for right_item in right]
    if threshold is None:
        return 2 * compute_best_sum(table) / (len(right) + len(answers))
    hits = [[float(value >= threshold - SLACK) for value in row] for row in table]
    return float(len(right) == len(answers) and compute_best_sum(hits) == len(right))


def compute_best_sum(table: Sequence[Sequence[float]]) -> float:
    """Return the largest sum over table entries no two of which share a row or a column."""
    if len(table) == 1 or len(table[0]) == 1:
        return max(max(row) for row in table)
    import numpy as np
    from scipy.optimize import linear_sum_assignment  # the import takes a third of a second

    values = np.array(table)
    return float(values[linear_sum_assignment(values, maximize=True)].sum())


# ---------------------------------------------------------------- qualities


def compute_overlap(first: Span, second: Span, *, generalized: bool = False) -> float:
    """Return the IoU of two spans, or (GIoU + 1) / 2 if `generalized`; 0 if a span does not end after its start."""
    if first[0] >= first[1] or second[0] >= second[1]:
        return 0.0
    shared = max(0.0, min(first[1], second[1]) - max(first[0], second[0]))
    union = (first[1] - first[0]) + (second[1] - second[0]) - shared
    hull = max(first[1], second[1]) - min(first[0], second[0])
    return (shared / union + union / hull) / 2 if generalized else shared / union


def compute_box_quality(first: PlaneShape, second: PlaneShape, *, generalized: bool, labels: bool) -> float:
    """Return the IoU of two boxes (x1, y1, x2, y2), or (GIoU + 1) / 2 if `generalized` (Rezatofighi et al. 2019).

    Return 0 if a box has no area, or if `labels` is true and the labels differ.
    """
    if labels and not has_same_label(first, second):
        return 0.0
    (ax, ay, bx, by), (cx, cy, dx, dy) = first.numbers, second.numbers
    if ax >= bx or ay >= by or cx >= dx or cy >= dy:
        return 0.0
    shared = max(0.0, min(bx, dx) - max(ax, cx)) * max(0.0, min(by, dy) - max(ay, cy))
    union = (bx - ax) * (by - ay) + (dx - cx) * (dy - cy) - shared
    hull = (max(bx, dx) - min(ax, cx)) * (max(by, dy) - min(ay, cy))
    return (shared / union + union / hull) / 2 if generalized else shared / union


def has_same_label(first: PlaneShape, second: PlaneShape) -> bool:
    return normalize(first.label) == normalize(second.label)


def compute_distance(right: PlaneShape, point: PlaneShape) -> float:
    """Return the distance from `point` to the reference, which is a point, or a box, whose nearest position counts."""
    x, y = point.numbers[:2]
    left_edge, top, *corner = right.numbers
    far_x, far_y = corner if len(corner) == 2 else (left_edge, top)
    return math.hypot(max(left_edge - x, 0.0, x - far_x), max(top - y, 0.0, y - far_y))


def compute_nearness(far: float, limit: float, score: Literal["linear", "exp"]) -> float:
    """Map a distance to a score; distance 0 scores 1."""
    return math.exp(-far / limit) if score == "exp" else max(0.0, 1.0 - far / limit)


# ---------------------------------------------------------------- coordinates


def check_range(sample: Sample, shapes: Sequence[PlaneShape], coordinates: Coordinates) -> None:
    """Raise DataError if the reference's numbers do not fit the option `coordinates`."""
    numbers = [value for shape in shapes for value in shape.numbers]
    largest = RANGES.get(coordinates, math.inf)
    if any(value > largest or (value < 0 and largest < math.inf) for value in numbers):
        raise build_data_error(
            sample,
            f'has numbers outside {coordinates}; set the reward\'s option coordinates = "pixels" or another range',
        )
    if coordinates == "0-1000" and any(0 < value < 1 for value in numbers) and max(numbers) <= 1:
        raise build_data_error(sample, 'has only numbers from 0 to 1; set the reward\'s option coordinates = "0-1"')


def convert_to_reference_units(
    shapes: list[PlaneShape] | None, sample: Sample, of_answer: Coordinates, of_reference: Coordinates
) -> list[PlaneShape] | None:
    """Convert an answer's shapes to the reference's unit."""
    if of_answer == of_reference:
        return shapes
    sizes = {
        name: get_image_size(sample) if name == "pixels" else (RANGES[name],) * 2 for name in (of_answer, of_reference)
    }
    (ax, ay), (rx, ry) = sizes[of_answer], sizes[of_reference]
    return None if shapes is None else [shape.scale(rx / ax, ry / ay) for shape in shapes]


def get_image_size(sample: Sample) -> tuple[float, float]:
    """Return the row's `width` and `height` in pixels; raise DataError if they are missing or invalid."""
    size = sample.meta.get("width"), sample.meta.get("height")
    if not all(isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6 for value in size):
        raise build_data_error(
            sample,
            f"requires the image size, but the row's width and height are {size[0]!r} and {size[1]!r}; add them, or set "
            "the reward's `coordinates` and `limit` options so that the size is not needed",
        )
    return float(size[0] or 0), float(size[1] or 0)
