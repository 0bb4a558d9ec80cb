"""Readings of varied answers, compared with those of a person. `held out` cases were written before the first run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dsreason.rewards.reading.numbers import read_quantity
from dsreason.rewards.reading.plain import to_plain
from dsreason.rewards.reading.shapes import PointForm, read_boxes, read_points
from dsreason.rewards.reading.times import read_spans

ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "readings.jsonl").read_text(encoding="utf-8").splitlines()
]
TUNED = [row for row in ROWS if row["part"] == "tuned"]


def reading(kind: str, text: str) -> Any:
    """Return the reading in the format of the fixture.

    The format is a list of numbers, or for a number its value in the first unit of its dimension.
    """
    text = to_plain(text)
    if kind == "number":
        result = read_quantity(text)
        return None if result is None else result.base
    if kind == "span":
        times = read_spans(text)
        return None if times is None else [list(span) for span in times]
    shapes = (
        read_boxes(text) if kind == "box" else read_points(text, PointForm((2, 3) if kind == "waypoints" else (2,)))
    )
    return None if shapes is None else [list(shape.numbers) for shape in shapes]


def outcome(row: dict[str, Any]) -> str:
    result, right = reading(row["kind"], row["text"]), row["read"]
    if result is None:
        return "read" if right is None else "unread"
    flat = [pytest.approx(part) for part in right] if isinstance(right, list) else pytest.approx(right)
    return "read" if right is not None and result == flat else "misread"


@pytest.mark.parametrize("row", TUNED, ids=lambda row: row["text"][:40])
def test_answer_reading_matches_human_reading(row):
    assert outcome(row) == "read"


def test_most_held_out_answers_are_read():
    counts = Counter(outcome(row) for row in ROWS if row["part"] == "held out")
    wrong = [row["text"] for row in ROWS if row["part"] == "held out" and outcome(row) == "misread"]
    assert counts["misread"] <= 3, wrong
    assert counts["read"] >= 70, [row["text"] for row in ROWS if outcome(row) == "unread"]
