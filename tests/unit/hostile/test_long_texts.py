"""Foreign texts that begin the same thing again and again: the time of reading grows with their length, not with its square.

A reader that goes back at each beginning takes a minute for these 300,000 characters, and hours for the 8 MB that a server may
answer; the others take a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest

from dsreason.answers.parsing import parse
from dsreason.answers.types import Kind
from dsreason.data.options import listed_options, option_letter
from dsreason.data.types import Sample
from dsreason.rewards import BUILT_IN
from dsreason.rewards.latex import normalise
from dsreason.screen import visible
from dsreason.secrets import without_credentials
from dsreason.text import split_response
from tests.unit.hostile.guard import guarded

LENGTH = 300_000
OPTIONS = {"A": "left turn", "B": "turn", "C": "3"}
REFERENCES = {
    "temporal_iou": "00:01 to 00:05",
    "box_iou": "[10, 20, 30, 40]",
    "points": "[[10, 20], [30, 40]]",
    "numeric": "3.5 m",
    "json_fields": '{"a": 1}',
}


def parsing(kind: Kind, parser: Any = "default", options: dict[str, str] | None = OPTIONS) -> Callable[[str], object]:
    return lambda text: parse(text, "reasoning", parser, kind=kind, options=options)


def rewarding(name: str) -> Callable[[str], object]:
    return lambda text: BUILT_IN[name](text, Sample("7", [], answer=REFERENCES[name]))


READERS: dict[str, Callable[[str], object]] = {
    **{f"answers: {kind}": parsing(kind) for kind in get_args(Kind)},
    "answers: letters": parsing("multiple_choice", options=None),
    "answers: compat": parsing("open", "compat"),
    "thoughts": split_response,
    **{f"reward: {name}": rewarding(name) for name in REFERENCES},
    "reward: direct_math": normalise,
    "judge": importlib.import_module("dsreason.rewards.judge").plain_score,
    "options of a question": listed_options,
    "letter of an answer": lambda text: option_letter(text, OPTIONS),
    "screen": visible,
    "credentials": without_credentials,
}
BEGINNINGS = [
    *(
        "<think>",
        "a<answer>",
        "</",
        "<",
        "\\boxed{",
        "\\text{",
        "\\frac{1}{",
        "\\(",
        "$",
        "**",
        "«",
        '"',
        "(",
        "[",
        "{",
        "[1,",
    ),
    *(
        '{"a":',
        "((1,2),",
        "1,",
        "1.",
        "-",
        "#### ",
        " ",
        "\n ",
        ". ",
        "I ",
        "A or ",
        "not ",
        "because ",
        "from ",
        "00:",
        "score ",
    ),
    *("answer:", "https://", "token=", "ab_", "\\"),
]


@pytest.mark.parametrize("reader", READERS)
def test_the_time_of_reading_grows_with_the_length(reader: str) -> None:
    for beginning in BEGINNINGS:
        text = beginning * (LENGTH // len(beginning)) + "!"
        try:
            guarded(partial(read, reader, text))
        except AssertionError as error:
            raise AssertionError(f"{beginning!r} again and again") from error


def read(reader: str, text: str) -> None:
    READERS[reader](text)
