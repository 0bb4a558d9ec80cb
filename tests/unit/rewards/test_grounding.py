"""Grounding rewards: hand-computed overlaps and distances, pairing, coordinates, and unusable answers and references."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.rewards import box_iou, points, temporal_iou
from dsreason.rewards.grounding import compute_best_sum


def asks(answer: Any, **meta: Any) -> Sample:
    return Sample("7", [], answer=answer, meta=meta)


# ---------------------------------------------------------------- spans


@pytest.mark.parametrize(
    ("completion", "reference", "worth"),
    [
        ("<think>It starts at 1 s.</think><answer>from 00:10 to 00:20</answer>", "[10, 20]", 1.0),
        ("[10, 20]", "[15, 25]", 5 / 15),
        ("[10, 20]", "[12, 14]", 2 / 10),  # nested
        ("[10, 20]", "[20, 30]", 0.0),
        ("[10, 20]", "[30, 40]", 0.0),
        ("00:10-00:20", '{"start": 15, "end": 20}', 5 / 10),
        ("[20, 10]", "[10, 20]", 0.0),  # reversed
        ("[15, 15]", "[10, 20]", 0.0),
        ("[0, 10], [20, 30]", "[[0, 10], [20, 30]]", 1.0),
        ("[20, 30], [0, 10]", "[[0, 10], [20, 30]]", 1.0),  # in any order
        ("[0, 10]", "[[0, 10], [20, 30]]", 2 * 1 / (2 + 1)),  # one is missing
        ("[0, 10], [20, 30], [40, 50]", "[[0, 10], [20, 30]]", 2 * 2 / (2 + 3)),  # one too many
        ("[0, 10], [0, 10]", "[0, 10]", 2 * 1 / (1 + 2)),  # the same one twice
        ("[[0, 10], [5, 15]]", "[[5, 15], [10, 20]]", 2 * (1 + 0) / 4),  # 1/3 + 1/3 would be less
        ("[]", "[]", 1.0),
        ("none", "[]", 1.0),
        ("[0, 10]", "[]", 0.0),
        ("[]", "[0, 10]", 0.0),
        ("I cannot tell.", "[]", 0.0),
        ("", "[10, 20]", 0.0),
        ("<think>[10, 20]", "[10, 20]", 0.0),  # thoughts do not count as an answer
    ],
)
def test_span_score_is_its_overlap(completion, reference, worth):
    assert temporal_iou(completion, asks(reference)) == pytest.approx(worth)


@pytest.mark.parametrize(
    ("completion", "threshold", "worth"),
    [
        ("[15, 25]", 0.3, 1.0),
        ("[15, 25]", 0.34, 0.0),
        ("[15, 20]", 0.5, 1.0),
        ("[15, 25], [1, 2]", 0.3, 0.0),
        ("", 0.3, 0.0),
    ],
)
def test_span_is_right_or_wrong_with_threshold(completion, threshold, worth):
    assert temporal_iou(completion, asks("[10, 20]"), threshold=threshold) == worth


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        ("[10, 20]", 1.0),
        ("[15, 25]", (1 / 3 + 1) / 2),
        ("[20, 30]", 0.5),
        ("[30, 40]", (20 / 30) / 2),
        ("[20, 10]", 0.0),
    ],
)
def test_generalized_overlap_ranks_nearer_span_higher(completion, worth):
    assert temporal_iou(completion, asks("[10, 20]"), generalized=True) == pytest.approx(worth)


def test_metrics_report_whether_span_was_read():
    assert temporal_iou("[10, 20]", asks("[10, 20]"), metrics=True) == (1.0, {"read": 1.0})
    assert temporal_iou("soon", asks("[10, 20]"), metrics=True) == (0.0, {"read": 0.0})


# ---------------------------------------------------------------- boxes


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        ('{"bbox_2d": [0, 0, 10, 10], "label": "cup"}', 1.0),
        ("[5, 0, 15, 10]", 50 / 150),
        ("[2, 2, 4, 4]", 4 / 100),  # nested
        ("[10, 0, 20, 10]", 0.0),  # they touch
        ("[10, 10, 0, 0]", 0.0),  # reversed
        ("[0, 0, 10, 10], [20, 20, 30, 30]", 2 / 3),
        ("[-5, -5, 5, 5]", 25 / 175),
        ("[1e999, 0, 10, 10]", 0.0),
        ("[NaN, 0, 10, 10]", 0.0),
        ("the cup", 0.0),
    ],
)
def test_box_score_is_its_overlap(completion, worth):
    assert box_iou(completion, asks("[0, 0, 10, 10]")) == pytest.approx(worth)


def test_boxes_are_paired_for_largest_overlap_sum():
    # A greedy choice would take 0.9 first, which leaves 0 for the other row.
    assert compute_best_sum([[0.9, 0.8], [0.8, 0.0]]) == pytest.approx(1.6)
    right = '[{"bbox_2d": [0, 0, 10, 10], "label": "a"}, {"bbox_2d": [20, 0, 30, 10], "label": "b"}]'
    value = (
        '[{"bbox_2d": [20, 0, 30, 5], "label": "B"}, {"bbox_2d": [0, 0, 10, 10], "label": "a"}, '
        '{"bbox_2d": [50, 50, 60, 60]}]'
    )
    assert box_iou(value, asks(right)) == pytest.approx(2 * (1 + 0.5) / 5)
    assert box_iou(value, asks(right), labels=True) == pytest.approx(2 * (1 + 0.5) / 5)
    assert box_iou(value.replace('"B"', '"cup"'), asks(right), labels=True) == pytest.approx(2 * 1 / 5)


@pytest.mark.parametrize(
    ("order", "completion"),
    [
        ("xywh", "[10, 20, 20, 20]"),
        ("cxcywh", "[20, 30, 20, 20]"),
        ("yxyx", "[20, 10, 40, 30]"),
        ("xyxy", "[10, 20, 30, 40]"),
    ],
)
def test_order_of_box_numbers_is_configurable(order, completion):
    assert box_iou(completion, asks(completion), order=order) == 1.0
    assert box_iou(completion.replace("]", ".0]"), asks(completion), order=order) == 1.0


def test_thousandths_are_compared_with_pixel_references():
    sample = asks("[64, 48, 320, 240]", width=640, height=480)
    assert box_iou("[100, 100, 500, 500]", sample, answer_coordinates="0-1000") == pytest.approx(1.0)
    assert box_iou("[0.1, 0.1, 0.5, 0.5]", sample, answer_coordinates="0-1") == pytest.approx(1.0)
    with pytest.raises(DataError, match="width and height are None and None"):
        box_iou("[100, 100, 500, 500]", asks("[64, 48, 320, 240]"), answer_coordinates="0-1000")


def test_generalized_overlap_of_boxes_matches_formula():
    # Two separate areas of 100 each; their hull is 30 x 10.
    assert box_iou("[20, 0, 30, 10]", asks("[0, 0, 10, 10]"), generalized=True) == pytest.approx((200 / 300) / 2)


# ---------------------------------------------------------------- points


@pytest.mark.parametrize(
    ("completion", "options", "worth"),
    [
        ('{"point_2d": [500, 300], "label": "cup"}', {}, 1.0),
        ("(530, 340)", {}, 0.5),  # at distance 50, with a limit of 100
        ("(530, 340)", {"limit": 200.0}, 0.75),
        ("(530, 340)", {"score": "exp"}, math.exp(-0.5)),
        ("(530, 340)", {"threshold": 50.0}, 1.0),
        ("(530, 340)", {"threshold": 49.0}, 0.0),
        ("(900, 900)", {}, 0.0),
        ("(500, 300), (900, 900)", {}, 2 / 3),
        ("(500, 300), (900, 900)", {"threshold": 50.0}, 0.0),
        ("[500, 300, 1]", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_point_score_decreases_with_distance(completion, options, worth):
    assert points(completion, asks("[500, 300]"), **options) == pytest.approx(worth)


def test_point_inside_reference_box_is_right():
    sample = asks('{"bbox_2d": [100, 100, 200, 200]}')
    assert points("(150, 199)", sample) == 1.0
    assert points("(230, 240)", sample) == pytest.approx(0.5)  # 30 and 40 away from the corner


def test_distance_limit_is_tenth_of_range():
    assert points("(0.5, 0.35)", asks("[0.5, 0.3]"), coordinates="0-1") == pytest.approx(0.5)
    assert points("(100, 132)", asks("[100, 100]", width=640, height=480), coordinates="pixels") == pytest.approx(0.5)
    with pytest.raises(DataError, match="width and height"):
        points("(100, 132)", asks("[100, 100]"), coordinates="pixels")


# ---------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("reward", "answer", "options", "text"),
    [
        (temporal_iou, None, {}, r"sample '7': field 'answer' \(None\) contains no span of time"),
        (temporal_iou, "soon", {}, r"\('soon'\) contains no span of time; write \[12.0, 15.0\]"),
        (temporal_iou, "[15, 12]", {}, "does not end after its start"),
        (box_iou, "[1, 2, 3]", {}, "no box"),
        (box_iou, "[10, 10, 10, 20]", {}, "without width or height; check that its numbers are in the order xyxy"),
        (box_iou, "[0, 0, 1200, 700]", {"coordinates": "0-1000"}, 'outside 0-1000; set .* coordinates = "pixels"'),
        (points, "[1200, 700]", {}, "outside 0-1000"),
        (points, "[0.5, 0.3]", {}, 'coordinates = "0-1"'),
        (points, "none of it", {}, "no point"),
    ],
)
def test_unreadable_reference_is_rejected(reward, answer, options, text):
    with pytest.raises(DataError, match=text):
        reward("[1, 2]", asks(answer), **options)
