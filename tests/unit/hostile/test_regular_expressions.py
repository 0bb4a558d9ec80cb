"""No regular expression goes back over a foreign text again and again: 20,000 characters take milliseconds, not seconds."""

from __future__ import annotations

import re

import pytest

from dsreason.answers import mentions
from tests.fuzz.fuzzing import within_time
from tests.unit.hostile.expressions import Use, texts, uses

LENGTH = 20_000
CPU_SECONDS = 0.2
SHORT = {"ANSWERS": mentions.LONGEST, "COUNTS": mentions.LONGEST}
"""Expressions that get no longer texts."""
OF_PLAIN_TEXT = (": REASON", ": ANSWERS", ": COUNTS", ": aside", ": only_letter", ": only_one_right", ": _split")
"""Read texts of which each white space is one character: `dsreason.answers` makes them so."""
OF_MARKED_TEXT = ("mentions.py: MARKED", "mentions.py: is_denied")
"""Read texts in which each « is one of ours."""
FOUND = uses()


@pytest.mark.parametrize("use", FOUND, ids=[f"{use.place} {use.method}" for use in FOUND])
def test_the_time_of_an_expression_grows_with_the_length(use: Use) -> None:
    for text in texts(use.pattern, SHORT.get(use.place.split()[-1], LENGTH)):
        if use.place.endswith(OF_PLAIN_TEXT):
            text = re.sub(r"(\s)\s+", r"\1", text)
        if use.place.endswith(OF_MARKED_TEXT):
            text = text.replace("«", "", text.count("«") - 1)
        within_time(use.read, text, CPU_SECONDS)


@pytest.mark.parametrize("pattern", [r"\s+$", r"(.+)x", r"(?s)<a>.*</a>", r"(a|a)*b", r"(\w+\s*)+:", r"\d+(?:,\d+)*;"])
def test_a_careless_expression_is_found(pattern: str) -> None:
    use = Use("here", "search", re.compile(pattern))
    with pytest.raises(AssertionError, match="processor time"):
        test_the_time_of_an_expression_grows_with_the_length(use)
