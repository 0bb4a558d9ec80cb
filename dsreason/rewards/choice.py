"""Rewards for multiple-choice questions."""

from __future__ import annotations

import re
from dataclasses import replace

from dsreason.answers.compat import tagged_answer
from dsreason.answers.correct import is_same, kind_of
from dsreason.answers.parsing import parse
from dsreason.data.options import option_letter
from dsreason.data.types import Sample
from dsreason.text import QuestionKind


def single_choice(completion: str, sample: Sample) -> float:
    """1 if the answer is the reference to the letter, case aside, else 0; the same as cosmos-rl's.

    Both are what is inside the first `<answer>…</answer>`, or the whole text if there is none. `(A)` is not `A`. Of a
    sample with options the reference may also be written `(A)`, "The answer is A", or as an option's text.
    """
    return float(tagged_answer(completion).lower() in {right.lower() for right in _references(sample)})


def single_choice_lenient(completion: str, sample: Sample) -> float:
    """1 if the final answer names the reference's option in any usual way, else 0: evaluation's verdict on multiple choice.

    Read are `A`, `(A)`, `A) text`, `**A**`, `\\boxed{A}`, `the answer is A`, an option's text and more, see
    `dsreason.answers.choices`. Without options any single letter counts. A reference that names no option is read as yes or
    no where it is one of them, and else compared as a text.
    """
    if sample.answer is None:
        return 0.0
    names_option = parse(sample.answer, "reasoning", options=sample.options).answer != ""
    kind: QuestionKind = "multiple_choice" if names_option else kind_of(replace(sample, options=None, meta={}))
    answer = parse(completion, "reasoning", kind=kind, options=sample.options).answer
    return float(is_same(answer, sample.answer, kind, sample.options))


def ordinal_choice(completion: str, sample: Sample, *, step: float = 0.5) -> float:
    """For answers that have an order: 1 for the right one, `step` less for each place beside it, never below 0.

    Whole numbers are as far apart as they differ, letters as their places in the sample's options. Other answers are right
    or wrong (case aside). Answers are read as in `single_choice`.
    """
    answer, references = tagged_answer(completion), _references(sample)
    places = {letter.upper(): place for place, letter in enumerate(sample.options or {})}
    for place in (_whole_number, lambda text: places.get(text.upper())):
        here, reference_places = (
            place(answer),
            [position for position in map(place, references) if position is not None],
        )
        if here is not None and reference_places:
            return max(0.0, 1.0 - step * min(abs(here - position) for position in reference_places))
    return float(answer.lower() in {right.lower() for right in references})


def _references(sample: Sample) -> list[str]:
    """How the right answer may be written: as the row has it, and the letter of the option that this names."""
    if sample.answer is None:
        return []
    letter = option_letter(sample.answer, sample.options or {})
    return [tagged_answer(sample.answer), *([letter] if letter else [])]


def _whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
