"""Messages about problems in rows, and the grouping of similar problems."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.problems import is_nested_deeper, mask_values, summarise_problems

CIRCLE: list[Any] = []
CIRCLE += [CIRCLE, {"again": CIRCLE}]


@pytest.mark.parametrize(
    ("value", "deeper"),
    [
        (0, False),
        ("text", False),
        (None, False),
        ([], False),
        ([[1], {"a": 2}], False),
        ([[{"a": ()}]], True),
        ({"a": {"b": [[]]}}, True),
        (CIRCLE, True),
    ],
    ids=repr,
)
def test_nesting_deeper_than_limit_is_detected(value: object, deeper: bool) -> None:
    assert is_nested_deeper(value, 3) is deeper


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("rows.jsonl, row 2 (sample '1'): image: no file /d e f/gone 1.png", "image: no file …"),
        ("a.json, row 3 (line 7): sample 'x': 81 tokens; at most 60", "sample …: … tokens; at most …"),
        ("/data/a, row 1: the assistant's text is '\"it\\'s\"', not None", "the assistant's text is …, not None"),
        ("missing media: rows.jsonl, row 2: no clip named a.mp4 in data x", "missing media: no clip named … in data x"),
        ("rows.jsonl, line 9: not a JSON object (char 8.5)", "not a JSON object (char …)"),
        ('field "a b" is missing', "field … is missing"),
    ],
)
def test_varying_parts_of_messages_are_masked(message: str, kind: str) -> None:
    assert mask_values(message) == kind


def test_problems_are_grouped_in_file_order() -> None:
    late, gone = "r, row {}: {} tokens", "r, row {}: no file /d/{}.png"
    messages = [
        late.format(1, 90),
        *(gone.format(i, i) for i in range(2, 6)),
        "r, row 6: no answer",
        late.format(7, 80),
    ]
    assert summarise_problems(messages) == [
        "2 times: … tokens",
        "  r, row 1: 90 tokens",
        "  r, row 7: 80 tokens",
        "4 times: no file …",
        "  r, row 2: no file /d/2.png",
        "  r, row 3: no file /d/3.png",
        "  r, row 4: no file /d/4.png",
        "r, row 6: no answer",
    ]


def test_problems_never_fill_more_than_a_screen() -> None:
    kinds = [f"r, row {i}: {'reason ' * 20}{chr(97 + i % 26) * (i + 1)}" for i in range(40)]
    lines = summarise_problems([*kinds, *kinds])
    assert sum(-(-len(line) // 100) for line in lines) <= 40
    assert lines[-1] == "and 68 more, for 34 other reasons"  # each kind takes 6 lines


def test_long_or_broken_messages_take_one_line() -> None:
    assert summarise_problems(["r, row 1: a\n  b", "r, row 2: " + "x" * 900]) == [
        "r, row 1: a b",
        "r, row 2: " + "x" * 489 + "…",
    ]
    assert summarise_problems([]) == []
