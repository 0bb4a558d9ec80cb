"""The rule that decides whether an answer is correct; validation, rewards and evaluation share it."""

from __future__ import annotations

from typing import get_args

from dsreason.answers.parsing import parse
from dsreason.data.messages import get_text
from dsreason.data.types import Sample
from dsreason.text import QuestionKind, normalize_answer, split_response


def is_correct(completion: str, sample: Sample) -> bool:
    """Return whether the completion gives an accepted answer, parsed and compared as in `Grader`; False without a reference."""
    reference, kind = get_reference(sample), get_question_kind(sample)
    answer = parse(completion, "reasoning", kind=kind, options=sample.options).answer
    accepted = () if reference is None else (reference, *sample.other_answers)
    return any(is_same(answer, text, kind, sample.options) for text in accepted)


def get_question_kind(sample: Sample) -> QuestionKind:
    """Return `meta["question_kind"]` if it is valid, or else the kind of the reference: an option, yes or no, or other text."""
    declared: QuestionKind = sample.meta.get("question_kind", "")
    if declared in get_args(QuestionKind):
        return declared
    reference = get_reference(sample) or ""
    if sample.options and parse(reference, "reasoning", options=sample.options).answer:
        return "multiple_choice"
    return "yes_no" if normalize_answer(split_response(reference).answer) in ("yes", "no") else "open"


def get_reference(sample: Sample) -> str | None:
    """Return the expected answer: `sample.answer`, or else the text of a final assistant turn, including tags.

    Return None if both are missing or blank.
    """
    if sample.answer is not None and sample.answer.strip():
        return sample.answer
    last = sample.messages[-1]
    reply = get_text(last) if last["role"] == "assistant" else ""
    return reply if reply.strip() else None


def is_same(answer: str, reference: str, kind: QuestionKind, options: dict[str, str] | None = None) -> bool:
    """Return whether a parsed answer equals the reference, which may be a response with tags; "" never does."""
    expected = parse(reference, "reasoning", kind=kind, options=options).answer
    if not answer or not expected:
        return False
    if kind == "ordinal":
        return float(answer) == float(expected)
    return normalize_answer(answer) == normalize_answer(expected)
