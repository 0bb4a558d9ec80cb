"""The kinds of answers, and what is read in a response."""

from __future__ import annotations

from typing import Literal, NamedTuple

AnswerType = Literal["letter", "reasoning"]


class Parsed(NamedTuple):
    """What was read in a response. `answer` is "" if nothing was, and `rule` then "none".

    Example: `Parsed(answer="C", reasoning="The arm turns left.", rule="letter and text")`.
    """

    answer: str
    reasoning: str
    rule: str
