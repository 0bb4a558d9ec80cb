"""The reward for waypoints, with hand-computed errors."""

from __future__ import annotations

import math

import pytest

from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.rewards import trajectory

SAMPLE = Sample("7", [], answer="[[1, 0], [2, 0], [3, 0], [4, 0]]")
NEAR = "(1, 0), (2, 0), (3, 1), (4, 1)"  # off by 0, 0, 1 and 1: ADE 0.5, FDE 1


@pytest.mark.parametrize(
    ("completion", "options", "worth"),
    [
        ("[[1, 0], [2, 0], [3, 0], [4, 0]]", {}, 1.0),
        (NEAR, {}, 1 - 0.5 / 2),
        (NEAR, {"error": "fde"}, 1 - 1 / 2),
        (NEAR, {"error": "both"}, (0.75 + 0.5) / 2),
        (NEAR, {"limit": 1.0}, 0.5),
        (NEAR, {"score": "exp"}, (2 + 2 * math.exp(-0.5)) / 4),
        (NEAR, {"threshold": 0.5}, 1.0),
        (NEAR, {"threshold": 0.49}, 0.0),
        (NEAR, {"threshold": 0.5, "error": "both"}, 0.0),  # FDE is 1
        ("(1, 0), (2, 0), (3, 0), (4, 10)", {}, 3 / 4),  # no waypoint costs more than the limit
        ("(1, 0), (2, 0), (3, 0)", {}, 3 / 4),  # so omitting it gains nothing
        ("(1, 0), (2, 0), (3, 0)", {"error": "fde"}, 0.0),
        ("(1, 0), (2, 0), (3, 0)", {"lengths": "equal"}, 0.0),
        ("(1, 0), (2, 0), (3, 0)", {"threshold": 2.0}, 0.0),
        ("(1, 0), (2, 0), (3, 0), (4, 0), (5, 0)", {}, 4 / 5),
        ("(1, 0), (4, 0)", {"lengths": "resample"}, 1.0),
        ("(1, 1), (4, 1)", {"lengths": "resample"}, 0.5),
        ("(1, 0)", {"lengths": "resample"}, (1 + 0.5 + 0 + 0) / 4),  # all four at (1, 0)
        ("(100 cm, 0 cm), (200 cm, 0 cm), (3 m, 0 m), (4 m, 0 m)", {}, 1.0),
        ("(1, 0, 0.1), (2, 0, 0.1), (3, 0, 0.2), (4, 0, 0.2)", {}, 1.0),  # headings are ignored
        ("straight on", {}, 0.0),
        ("", {}, 0.0),
        ("(NaN, 0), (NaN, 0)", {}, 0.0),
    ],
)
def test_trajectory_score_decreases_with_distance(completion, options, worth):
    assert trajectory(completion, SAMPLE, **options) == pytest.approx(worth)


def test_third_axis_counts_only_when_requested():
    sample = Sample("7", [], answer="[[0, 0, 0], [1, 0, 0]]")
    assert trajectory("[[0, 0, 1], [1, 0, 1]]", sample) == 1.0
    assert trajectory("[[0, 0, 1], [1, 0, 1]]", sample, axes=[0, 1, 2]) == 0.5


def test_lengths_are_converted_to_the_unit():
    sample = Sample("7", [], answer="[[100, 0], [200, 0]]")
    assert trajectory("(1 m, 0 m), (2 m, 0 m)", sample, unit="cm") == 1.0


def test_error_metrics_require_paths_of_equal_length():
    assert trajectory(NEAR, SAMPLE, metrics=True) == (0.75, {"read": 1.0, "ade": 0.5, "fde": 1.0})
    assert trajectory("(1, 0)", SAMPLE, metrics=True) == (0.25, {"read": 1.0})
    assert trajectory("left", SAMPLE, metrics=True) == (0.0, {"read": 0.0})


@pytest.mark.parametrize("answer", [None, "", "left", "[]"])
def test_reference_without_waypoints_is_rejected(answer):
    with pytest.raises(DataError, match="sample '7'.*no waypoints"):
        trajectory("(1, 0)", Sample("7", [], answer=answer))
