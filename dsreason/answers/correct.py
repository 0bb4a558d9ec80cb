"""Rules that decide whether an answer is correct, shared by validation, rewards and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from dsreason.answers.parsing import parse
from dsreason.data.messages import get_text
from dsreason.data.types import Sample
from dsreason.text import QuestionKind, normalize_answer, split_response


def is_correct(completion: str, sample: Sample) -> bool:
    """Return whether a completion gives an accepted answer, as `Grader` would decide; False if the sample has no reference."""
    reference, kind = get_reference(sample), get_question_kind(sample)
    answer = parse(completion, "reasoning", kind=kind, options=sample.options).answer
    return reference is not None and is_any(answer, (reference, *sample.other_answers), kind, sample.options)


def get_question_kind(sample: Sample) -> QuestionKind:
    """Return `meta["question_kind"]` if it is valid, or else infer the kind from the reference: option, yes/no or other text."""
    declared: QuestionKind = sample.meta.get("question_kind", "")
    if declared in get_args(QuestionKind):
        return declared
    reference = get_reference(sample) or ""
    if sample.options and parse(reference, "reasoning", options=sample.options).answer:
        return "multiple_choice"
    return "yes_no" if normalize_answer(split_response(reference).answer) in ("yes", "no") else "open"


def get_reference(sample: Sample) -> str | None:
    """Return the expected answer: `sample.answer`, or else the text of a final assistant message, including its tags.

    Return None if both are missing or blank.
    """
    if sample.answer is not None and sample.answer.strip():
        return sample.answer
    last = sample.messages[-1]
    reply = get_text(last) if last["role"] == "assistant" else ""
    return reply if reply.strip() else None


def is_any(answer: str, references: Iterable[str], kind: QuestionKind, options: dict[str, str] | None = None) -> bool:
    """Return whether a parsed answer equals one of the accepted answers; see `is_same`."""
    return any(is_same(answer, reference, kind, options) for reference in references)


def is_same(answer: str, reference: str, kind: QuestionKind, options: dict[str, str] | None = None) -> bool:
    """Return whether a parsed answer equals the reference, which may contain tags. An empty answer never equals a reference."""
    expected = parse(reference, "reasoning", kind=kind, options=options).answer
    if not answer or not expected:
        return False
    if kind == "ordinal":
        return float(answer) == float(expected)
    return normalize_answer(answer) == normalize_answer(expected)
