"""The rule that decides whether an answer is correct, shared by validation, rewards and evaluation."""

from __future__ import annotations

from typing import get_args

from dsreason.answers.parsing import parse
from dsreason.data.messages import text_of
from dsreason.data.types import Sample
from dsreason.text import QuestionKind, normalized_answer, split_response


def is_correct(completion: str, sample: Sample) -> bool:
    """Return whether the completion gives the sample's answer, parsed and compared as in `Grader`; False without a reference."""
    reference, kind = reference_of(sample), kind_of(sample)
    answer = parse(completion, "reasoning", kind=kind, options=sample.options).answer
    return reference is not None and is_same(answer, reference, kind, sample.options)


def kind_of(sample: Sample) -> QuestionKind:
    """Return `meta["question_kind"]` if it is valid; otherwise infer it from the reference: an option, yes or no, other text."""
    declared: QuestionKind = sample.meta.get("question_kind", "")
    if declared in get_args(QuestionKind):
        return declared
    reference = reference_of(sample) or ""
    if sample.options and parse(reference, "reasoning", options=sample.options).answer:
        return "multiple_choice"
    return "yes_no" if normalized_answer(split_response(reference).answer) in ("yes", "no") else "open"


def reference_of(sample: Sample) -> str | None:
    """Return the expected answer: `sample.answer`, or else the text of a final assistant turn, including its tags.

    Returns None if both are missing or blank.
    """
    if sample.answer is not None and sample.answer.strip():
        return sample.answer
    last = sample.messages[-1]
    reply = text_of(last) if last["role"] == "assistant" else ""
    return reply if reply.strip() else None


def is_same(answer: str, reference: str, kind: QuestionKind, options: dict[str, str] | None = None) -> bool:
    """Return whether a parsed answer equals the reference's, which may be a whole response with tags; "" never does."""
    expected = parse(reference, "reasoning", kind=kind, options=options).answer
    if not answer or not expected:
        return False
    if kind == "ordinal":
        return float(answer) == float(expected)
    return normalized_answer(answer) == normalized_answer(expected)
