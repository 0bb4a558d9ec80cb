"""Types for parsing: a question's answer type, and the parsed response."""

from __future__ import annotations

from typing import Literal, NamedTuple

AnswerType = Literal["letter", "reasoning"]


class Parsed(NamedTuple):
    """Parsed response. If no answer was found, `answer` is "" and `rule` is "none".

    Example: `Parsed(answer="C", reasoning="The arm turns left.", rule="letter and text")`.
    """

    answer: str
    reasoning: str
    rule: str
