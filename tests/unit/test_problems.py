"""Problems in words, and what counts as one."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.problems import is_nested_deeper

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
