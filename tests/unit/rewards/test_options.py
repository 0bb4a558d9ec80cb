"""Options of built-in rewards, which are checked before scoring, and robustness against arbitrary text."""

from __future__ import annotations

import math
import random

import pytest

from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.rewards import BUILT_IN
from dsreason.rewards.functions import READS_REFERENCE, find_reward

REFERENCES = {
    "temporal_iou": "[10, 20]",
    "box_iou": "[10, 10, 20, 20]",
    "points": "[10, 20]",
    "trajectory": "[[1, 2], [3, 4]]",
    "numeric": "3.2 m",
    "json_fields": '{"a": 1, "b": "x", "c": ["y"]}',
}


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (
            "temporal_iou",
            {"threshold": 1.5},
            r"option temporal_iou.threshold \(1.5\): input should be less than or equal to 1",
        ),
        ("temporal_iou", {"threshold": 0}, "greater than 0"),
        ("temporal_iou", {"threshold": "0.5"}, "should be a valid number"),
        ("temporal_iou", {"generalized": 1}, "valid boolean"),
        ("box_iou", {"order": "xxyy"}, "box_iou.order .*'xyxy', 'xywh', 'cxcywh' or 'yxyx'"),
        ("box_iou", {"coordinates": "pixel"}, "'pixels', '0-1000' or '0-1'"),
        ("points", {"limit": -1.0}, "points.limit .*greater than 0"),
        ("points", {"limit": math.nan}, "points.limit .*finite"),
        ("points", {"score": "gauss"}, "'linear' or 'exp'"),
        ("trajectory", {"error": "rmse"}, "'ade', 'fde' or 'both'"),
        ("trajectory", {"axes": []}, "trajectory.axes .*at least 1"),
        ("trajectory", {"axes": [0, -1]}, "greater than or equal to 0"),
        ("trajectory", {"unit": "yards"}, "'m', 'cm'"),
        ("numeric", {"relative": -0.1}, "greater than or equal to 0"),
        ("numeric", {"unit": "furlong"}, "numeric.unit"),
        ("json_fields", {"fields": ["a"]}, "valid dictionary"),
        ("judge", {"votes": 0}, "judge.votes .*greater than or equal to 1"),
        ("numeric", {"tolerance": 1.0}, "unexpected keyword argument 'tolerance'"),
    ],
)
def test_invalid_option_value_is_rejected(name, options, text):
    with pytest.raises(ConfigError, match=text):
        find_reward(name, options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("temporal_iou", {"threshold": 1, "metrics": True}),
        ("points", {"limit": 5, "threshold": 0}),
        ("trajectory", {"axes": [0, 1, 2], "lengths": "resample"}),
        ("numeric", {"unit": "%", "score": "mra"}),
        ("ordinal_choice", {"step": 0.25}),
    ],
)
def test_valid_options_are_passed_to_function(name, options):
    assert find_reward(name, options).keywords == options


def hostile() -> list[str]:
    drawn = random.Random(0)
    pieces = [
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        "<box>",
        "</answer>",
        "<answer>",
        "12",
        ":",
        "-",
        ",",
        ".",
        "e9",
        "to",
        "from",
        '"',
        "\\frac{",
        "NaN",
    ]
    made = ["".join(drawn.choices(pieces, k=200)) for _ in range(200)]
    fixed = [
        "\x00",
        "\ud800",
        "１２：３０",
        "٣-٤",
        "½⅓",
        "9" * 5000,
        "1e999",
        "[" * 5000,
        '{"a":' * 5000,
        "[1e400, 2]",
        "\u202e12",
        "ﷺ" * 50,
    ]
    return [
        *made,
        *fixed,
        '{"start": null, "end": {}}',
        '{"bbox_2d": [null, "x", [], {}]}',
        "true",
        "[[[[]]]]",
        '{"x": [1], "y": [2, 3]}',
    ]


@pytest.mark.parametrize("name", READS_REFERENCE)
def test_any_completion_gets_score_between_0_and_1(name):
    sample = Sample("7", [], answer=REFERENCES[name])
    for text in hostile():
        assert 0.0 <= BUILT_IN[name](text, sample) <= 1.0


ATTACKS = [
    "1:", "1 ", "0:1-", "1h 1m ", "from ", "from 1 ", "[", "[1,", "[1, 2] ", "{", '{"a": ', "(1 ", "1,", "1.", "- ", "x1=",
    "x1=1 ", "\\frac{1}{", "\\text{", "1 and ", "<answer>", "<", "start 1 ", "is ", "=", "1/", "１", " ", "\n", "12:34 - ",
    "(1, 2), ", "1000 000 ", "-", "e", "_",
]  # fmt: skip


@pytest.mark.parametrize("name", READS_REFERENCE)
def test_long_repetitive_completion_is_scored_in_time(name):
    """Read long repetitions in linear time; quadratic reading, or worse, would take minutes."""
    sample = Sample("7", [], answer=REFERENCES[name])
    for attack in ATTACKS:
        assert 0.0 <= BUILT_IN[name](attack * (60_000 // len(attack)), sample) <= 1.0
