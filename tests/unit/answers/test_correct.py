"""Reference answers of samples, and the grading of completions against these answers."""

from __future__ import annotations

import pytest

from dsreason.answers.correct import get_question_kind, get_reference, is_correct
from dsreason.data.types import Sample

OPTIONS = {"A": "to the left", "B": "to the right"}


def sample(answer=None, options=None, *, last=None, **meta):
    messages = [{"role": "user", "content": "?"}]
    if last is not None:
        messages.append({"role": "assistant", "content": last})
    return Sample("7", messages, answer, options, meta)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (sample("A", OPTIONS), "multiple_choice"),
        (sample("to the left", OPTIONS), "multiple_choice"),
        (sample("upwards", OPTIONS), "open"),
        (sample("Yes."), "yes_no"),
        (sample(last="<think>x</think><answer>no</answer>"), "yes_no"),
        (sample("red"), "open"),
        (sample("3", question_kind="ordinal"), "ordinal"),
        (sample("yes", question_kind="free_text"), "free_text"),
        (sample("yes", question_kind="colour"), "yes_no"),
        (sample(), "open"),
    ],
)
def test_question_kind_is_inferred_from_sample(given, kind):
    assert get_question_kind(given) == kind


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        (sample("A", last="B"), "A"),
        (sample(last="<answer>B</answer>"), "<answer>B</answer>"),
        (sample(last=[{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]), "B\nC"),
        (sample(), None),
        (sample(" ", last="B"), "B"),
        (sample(""), None),
        (sample(last=" \n"), None),
    ],
)
def test_reference_is_answer_field_or_last_reply(given, reference):
    assert get_reference(given) == reference


@pytest.mark.parametrize(
    ("completion", "given", "right"),
    [
        ("<think>B</think><answer>(a)</answer>", sample("A", OPTIONS), True),
        ("<answer>B</answer>", sample("A", OPTIONS), False),
        ("Upwards.", sample("upwards", OPTIONS), True),
        ("Yes, it does.", sample("yes"), True),
        ("<answer>Red</answer>", sample(last="<think>x</think><answer>red.</answer>"), True),
        ("4", sample("4.0", question_kind="ordinal"), True),
        ("", sample(""), False),
        ("anything", sample(), False),
    ],
)
def test_completion_is_graded_like_an_evaluated_answer(completion, given, right):
    assert is_correct(completion, given) is right


def test_any_accepted_answer_is_correct():
    accepted = Sample("7", [{"role": "user", "content": "?"}], answer="6", other_answers=("six",))
    assert [is_correct(text, accepted) for text in ("6", "Six.", "seven")] == [True, True, False]
