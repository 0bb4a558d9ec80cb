"""Untrusted texts that begin the same structure many times. Reading time must grow with their length, not with its square.

A reader that backtracks at each beginning takes 16 times as long for four times the text, and hours for the 8 MB that a server
may return; a linear reader takes four times as long.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, get_args

import pytest

from dsreason.answers.parsing import parse
from dsreason.data.options import find_option_letter, parse_listed_options
from dsreason.data.types import Sample
from dsreason.rewards import BUILT_IN
from dsreason.rewards.latex import normalise
from dsreason.screen import escape_control
from dsreason.secrets import mask_credentials
from dsreason.text import QuestionKind, split_response
from tests.fuzz.fuzzing import within_time

LENGTH, SHORT_TIME, MOST_TIME = 10_000, 0.1, 20
"""Number of characters of a short text, and limits in seconds of processor time."""
OPTIONS = {"A": "left turn", "B": "turn", "C": "3"}
REFERENCES = {
    "temporal_iou": "00:01 to 00:05",
    "box_iou": "[10, 20, 30, 40]",
    "points": "[[10, 20], [30, 40]]",
    "numeric": "3.5 m",
    "json_fields": '{"a": 1}',
}


def parsing(
    kind: QuestionKind, parser: Any = "default", options: dict[str, str] | None = OPTIONS
) -> Callable[[str], object]:
    return lambda text: parse(text, "reasoning", parser, kind=kind, options=options)


def rewarding(name: str) -> Callable[[str], object]:
    return lambda text: BUILT_IN[name](text, Sample("7", [], answer=REFERENCES[name]))


def one_option(text: str) -> object:
    return parse_listed_options(f"Which?\n(A) left{text[:900]}x\n(B) right")


READERS: dict[str, Callable[[str], object]] = {
    **{f"answers: {kind}": parsing(kind) for kind in get_args(QuestionKind)},
    "answers: letters": parsing("multiple_choice", options=None),
    "answers: compat": parsing("open", "compat"),
    "thoughts": split_response,
    **{f"reward: {name}": rewarding(name) for name in REFERENCES},
    "reward: direct_math": normalise,
    "judge": importlib.import_module("dsreason.rewards.judge").find_plain_score,
    "options of a question": parse_listed_options,
    "separators in a question": one_option,
    "letter of an answer": lambda text: find_option_letter(text, OPTIONS),
    "screen": escape_control,
    "credentials": mask_credentials,
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
    *("answer:", "https://", "token=", "ab_", "\\", ",", "; ", "«a", "so B  "),
]


@pytest.mark.parametrize("reader", READERS)
def test_reading_time_is_roughly_linear(reader: str) -> None:
    for beginning in BEGINNINGS:
        long, short = (beginning * (length // len(beginning)) + "!" for length in (LENGTH, LENGTH // 4))
        if seconds_of(reader, long) > SHORT_TIME:
            seconds, short_seconds = (min(seconds_of(reader, text) for _ in range(3)) for text in (long, short))
            assert seconds < 9 * short_seconds, f"{beginning!r} again and again"


def seconds_of(reader: str, text: str) -> float:
    before = time.process_time()
    within_time(READERS[reader], text, MOST_TIME)
    return time.process_time() - before
