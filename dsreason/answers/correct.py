"""Whether an answer is right: the one rule of training's validation, rewards and evaluation."""

from __future__ import annotations

from typing import get_args

from dsreason.answers.parsing import parse
from dsreason.data.messages import text_of
from dsreason.data.types import Sample
from dsreason.text import QuestionKind, normalized_answer, split_response


def is_correct(completion: str, sample: Sample) -> bool:
    """Return whether the completion gives the sample's answer, read and compared as by `Grader`; False without a reference."""
    reference, kind = reference_of(sample), kind_of(sample)
    answer = parse(completion, "reasoning", kind=kind, options=sample.options).answer
    return reference is not None and is_same(answer, reference, kind, sample.options)


def kind_of(sample: Sample) -> QuestionKind:
    """`meta["question_kind"]` where it is a kind; else by what the reference is: one of the options, yes or no, another text."""
    given: QuestionKind = sample.meta.get("question_kind", "")
    if given in get_args(QuestionKind):
        return given
    reference = reference_of(sample) or ""
    if sample.options and parse(reference, "reasoning", options=sample.options).answer:
        return "multiple_choice"
    return "yes_no" if normalized_answer(split_response(reference).answer) in ("yes", "no") else "open"


def reference_of(sample: Sample) -> str | None:
    """Return what the answer should be: `sample.answer`, else the text of a last assistant turn; with its tags, if it has any.

    None if it is blank, too.
    """
    if sample.answer is not None and sample.answer.strip():
        return sample.answer
    last = sample.messages[-1]
    reply = text_of(last) if last["role"] == "assistant" else ""
    return reply if reply.strip() else None


def is_same(answer: str, reference: str, kind: QuestionKind, options: dict[str, str] | None = None) -> bool:
    """Return whether a parsed answer is the reference's, which may be a whole response, tags and all. "" is never."""
    right = parse(reference, "reasoning", kind=kind, options=options).answer
    if not answer or not right:
        return False
    return float(answer) == float(right) if kind == "ordinal" else normalized_answer(answer) == normalized_answer(right)
