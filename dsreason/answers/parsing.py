"""Parser that splits a response into reasoning and answer, and names the rule that found the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from dsreason.answers.choices import read_option
from dsreason.answers.compat import parse_compat
from dsreason.answers.phrases import VERDICT
from dsreason.answers.text import find_last_boxed, strip_markup
from dsreason.answers.types import AnswerType, Parsed
from dsreason.answers.verdicts import UNREAD, iter_verdicts, read_yes_no
from dsreason.text import QuestionKind, Response, split_response

Parser = Literal["default", "compat", "digit"]

NUMBER = r"([+-]?[0-9]+(?:\.[0-9]+)?)(?:\s*/\s*[0-9]+|\s+out\s+of\s+[0-9]+)?"
SCORE = re.compile(
    rf"{VERDICT.pattern}|\b(?:score|rating|rate)\b(?:\s+(?:it|is|of|a|this|as))*\s*[:=]?\s*", re.IGNORECASE
)
RATING = re.compile(r"(?<!\w)(?<!\d[.,])[1-5](?!\w|[.,]\d)")
"""Digit from 1 to 5 that is not part of a word or of another number."""


def parse(
    text: str,
    answer_type: AnswerType,
    parser: Parser = "default",
    *,
    kind: QuestionKind = "multiple_choice",
    options: dict[str, str] | None = None,
) -> Parsed:
    """Return a response's answer, its reasoning, and the rule that found the answer.

    `default` parses the text after the reasoning: the last `<answer>` block, complete or truncated, or else all remaining text
    (because `reasoning` expects tags, the rule then ends in "without answer tags"). The returned answer depends on `kind`:
      - multiple_choice: the key in `options` of the only option that the text chooses (`choices` describes the rules).
      - yes_no: `yes` or `no`.
      - ordinal: a number on a separate line, or after "score", "rating" or "the answer is", exactly as written.
      - open, free_text: the complete text.
    `digit` takes the first digit from 1 to 5 that stands alone as the answer of kind ordinal. `compat` is the parser of
    cosmos-reason1, which takes the first capital letter for every kind; see the module `compat`.

    Example: `parse("<think>It turns.</think> <answer>C. left</answer>", "reasoning")` gives
    `Parsed(answer="C", reasoning="It turns.", rule="letter and text")`.

    Raises:
        ValueError: the answer type, parser or kind is unknown; the message lists the valid ones.
    """
    _check("answer_type", answer_type, get_args(AnswerType))
    _check("parser", parser, get_args(Parser))
    _check("kind", kind, get_args(QuestionKind))
    if parser == "compat":
        return parse_compat(text, answer_type)
    response = split_response(text)
    if parser == "digit" and kind == "ordinal":
        answer, rule = read_rating(response.answer)
    else:
        answer, rule = _read(response, kind, options)
    if answer and answer_type == "reasoning" and not response.tagged:
        rule += ", without answer tags"
    return Parsed(answer, response.thoughts, rule)


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")


def _read(response: Response, kind: QuestionKind, options: dict[str, str] | None) -> tuple[str, str]:
    if kind == "multiple_choice":
        return read_option(response.answer, options)
    if kind == "yes_no":
        return read_yes_no(response.answer)
    if kind == "ordinal":
        return read_number(response.answer)
    return (response.answer, "tagged text" if response.tagged else "whole text") if response.answer else UNREAD


def read_rating(text: str) -> tuple[str, str]:
    """Return the first standalone digit from 1 to 5, and its rule: in `about 4/5 (3 balls)`, it is 4."""
    rating = RATING.search(text)
    return (rating[0], "first digit") if rating else UNREAD


def read_number(text: str) -> tuple[str, str]:
    """Return a number as written, and its rule: the first line that is only a number (`4.`, `4/5`), or the last "score: 4"."""
    boxed = find_last_boxed(text)
    plain = strip_markup(text if boxed is None else boxed)
    for line in plain.splitlines():
        if number := re.fullmatch(rf"[\s(\[\"'#>•-]*?{NUMBER}\W*", line):
            return number[1], "only number"
    scores = [
        match[1] for _, line in iter_verdicts(plain, SCORE) if (match := re.match(rf"{NUMBER}(?![\w%]|[.,-]\d)", line))
    ]
    return (scores[-1], "score is") if scores else UNREAD
