"""For any answer of a model, every parser and reward finishes in time, gives the same result twice, and returns a score in its
range."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import strategies as st

from dsreason.answers.correct import is_same
from dsreason.answers.parsing import Parser, parse
from dsreason.answers.types import AnswerType
from dsreason.data.options import parse_listed_options
from dsreason.data.types import Sample
from dsreason.rewards import BUILT_IN
from dsreason.rewards.latex import normalise
from dsreason.text import QuestionKind, split_response
from tests.fuzz.fuzzing import Fuzz

pytestmark = [pytest.mark.integration, pytest.mark.long]

VOCABULARY = """
<think> </think> <answer> </answer> < /answer > <box> ** ` $ $$ \\boxed{ } \\frac{1}{2} \\text{ \\( \\) { [ ] ( ) «» " '
A B. (C) D: E) [A] a) I option choice answer is: the therefore, So because not never neither nor both and or either but wait
correct incorrect wrong fits matches Yes no maybe it's isn't can't ? ! ; … → => -> - – / = : , . ... 1. 2) #
0 1 -3 4/5 1/0 3.14 1e9 1e999 1,000 1.000,5 ½ ² × 10^3 50% 3 m 2 cm 7 km/h 90° five twenty hundred minus between ± ~
00:01 1:02:03 99:99 0.5s 3 seconds from to until [1, 2] [[0,0],[1,1]] {"bbox_2d": [1,2,3,4]} {"start": 1, "end": 2} {"a": null}
none N/A left turn right turn turn left the car score rating out of 10 fig. e.g. no. 是 否 选 答案 ا ß İ ſ ﬁ \u202e \u200b \x00
"""
PIECES = [*VOCABULARY.split(), "\n", "\t", "\r\n", " ", "  "]

words = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=25)
separators = st.sampled_from(["", " ", "\n", ", "])
phrases = st.builds(lambda separator, parts: separator.join(parts), separators, words)
long_ones = st.builds(
    lambda before, piece, count, after: before + piece * count + after,
    phrases,
    st.one_of(st.sampled_from(PIECES), phrases).map(lambda piece: piece[:40]),
    st.sampled_from([10, 100, 1000]),
    phrases,
)
answers = st.one_of(phrases, phrases, long_ones)
options = st.one_of(
    st.none(), st.dictionaries(st.sampled_from("ABCDEI"), phrases, max_size=5), st.just({"A": "left turn", "B": "turn"})
)

REFERENCES = {
    "temporal_iou": "00:01 to 00:05",
    "box_iou": "[10, 20, 30, 40]",
    "points": "[[10, 20], [30, 40]]",
    "trajectory": "[[0, 0], [1, 1], [2, 4]]",
    "numeric": "3.5 m",
    "json_fields": '{"a": 1, "b": ["x", "y"]}',
    "gsm8k": "#### 42",
    "ordinal_choice": "4",
}
ELSEWHERE = ("judge", "boxed_math", "direct_math", "overlong")
"""Rewards that are tested elsewhere: they query a server, compute in a worker that can be killed, or use only the length."""


def test_parsers_and_rewards_accept_any_answer(fuzz: Fuzz) -> None:
    fuzz(lambda given: check(*given), st.tuples(answers, options, answers))


def check(text: str, choices: dict[str, str] | None, reference: str) -> None:
    split_response(text)
    normalise(text)
    parse_listed_options(text)
    for parser in get_args(Parser):
        for kind in get_args(QuestionKind):
            for answer_type in get_args(AnswerType):
                parsed = parse(text, answer_type, parser, kind=kind, options=choices)
                assert all(isinstance(part, str) for part in parsed)
                assert parse(text, answer_type, parser, kind=kind, options=choices) == parsed
    for kind in get_args(QuestionKind):
        is_same(parse(text, "reasoning", kind=kind, options=choices).answer, reference, kind, choices)
    for name, reward in BUILT_IN.items():
        if name not in ELSEWHERE:
            score = reward(text, Sample("7", [], answer=REFERENCES.get(name, "A"), options=choices))
            assert isinstance(score, float | int) and math.isfinite(score) and -1 <= score <= 1, (name, score)
