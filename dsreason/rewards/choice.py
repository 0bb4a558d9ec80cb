"""Rewards for multiple-choice questions."""

from __future__ import annotations

import re
from dataclasses import replace

from dsreason.answers.compat import extract_tagged_answer
from dsreason.answers.correct import get_question_kind, is_same
from dsreason.answers.parsing import parse
from dsreason.data.options import find_option_letter
from dsreason.data.types import Sample
from dsreason.text import QuestionKind


def single_choice(completion: str, sample: Sample) -> float:
    """Return 1 if the answer equals the reference, ignoring case, else 0. The reward is the same as in cosmos-rl.

    Answer and reference are taken from the first `<answer>…</answer>` block, or from the full text if there is no such block.
    `(A)` does not equal `A`. If the sample has options, the reference may also be `(A)`, "The answer is A", or an option's text.
    """
    return float(
        extract_tagged_answer(completion).lower() in {reference.lower() for reference in _list_references(sample)}
    )


def single_choice_lenient(completion: str, sample: Sample) -> float:
    """Return 1 if the final answer names the reference option in any common form, else 0. Evaluation uses the same rule.

    Accepted forms include `A`, `(A)`, `A) text`, `**A**`, `\\boxed{A}`, `the answer is A` and an option's text; see
    `dsreason.answers.choices`. If the sample has no options, any single letter counts as an option. A reference that does not
    name an option is compared as yes or no if it is either of these, and as text otherwise.
    """
    if sample.answer is None:
        return 0.0
    names_option = parse(sample.answer, "reasoning", options=sample.options).answer != ""
    kind: QuestionKind = (
        "multiple_choice" if names_option else get_question_kind(replace(sample, options=None, meta={}))
    )
    answer = parse(completion, "reasoning", kind=kind, options=sample.options).answer
    return float(is_same(answer, sample.answer, kind, sample.options))


def ordinal_choice(completion: str, sample: Sample, *, step: float = 0.5) -> float:
    """Return 1 minus `step` times the distance between answer and reference, at least 0; for answers that have an order.

    The distance between whole numbers is their difference. The distance between letters is the difference between their
    positions among the sample's options. Any other answer is either right or wrong, ignoring case. Answers are extracted as
    in `single_choice`.
    """
    answer, references = extract_tagged_answer(completion), _list_references(sample)
    letter_positions = {letter.upper(): position for position, letter in enumerate(sample.options or {})}
    for find_position in (_parse_whole_number, lambda text: letter_positions.get(text.upper())):
        answer_position, reference_positions = (
            find_position(answer),
            [position for position in map(find_position, references) if position is not None],
        )
        if answer_position is not None and reference_positions:
            return max(0.0, 1.0 - step * min(abs(answer_position - position) for position in reference_positions))
    return float(answer.lower() in {reference.lower() for reference in references})


def _list_references(sample: Sample) -> list[str]:
    """Return the accepted forms of the reference: as written in the row, and the letter of the option that it names."""
    if sample.answer is None:
        return []
    letter = find_option_letter(sample.answer, sample.options or {})
    return [extract_tagged_answer(sample.answer), *([letter] if letter else [])]


def _parse_whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else None
