"""Rewards that read text, compared with hand-made scores and with results of cosmos-rl's functions."""

from __future__ import annotations

import pytest

from dsreason.data.types import Sample
from dsreason.rewards import exact_match, format, gsm8k, overlong
from dsreason.rewards.text import COSMOS_FORMAT, add_length, compute_soft_overlong, describe_format_problem


def asks(answer: str | None) -> Sample:
    return Sample("7", [], answer=answer)


ALSO_IN_COSMOS = [
    "<think>a</think>\n\n<answer>A</answer>",
    "<think>\na\n</think>\n\n<answer>\nA\n</answer>",
    "<think>a</think>\n\n<answer>A</answer>\n",
    "<think></think>\n\n<answer></answer>",
    "<think><b>x</b> 2 < 3</think>\n\n<answer>A</answer>",
    "<think>a</think>\n\n<answer>A</answer><answer>B</answer>",
]
NOT_IN_COSMOS = [
    "<think>a</think> <answer>A</answer>",
    "<think>a</think>\n<answer>A</answer>",
    "<think>a</think>\n\n\n<answer>A</answer>",
    "<think>a</think><answer>A</answer>",
    " <think> a </think> <answer> A </answer> ",
]
WRONG = [
    "",
    "A",
    "<answer>A</answer>",
    "<think>a</think> A",
    "<answer>A</answer> <think>a</think>",
    "So: <think>a</think> <answer>A</answer>",
    "<think>a</think> so <answer>A</answer>",
    "<think>a</think> <answer>A</answer>.",
    "<think>a</think> <answer>A</answer> done",
    "<think>a <answer>A</answer>",
    "<think>a</think> <answer>A",
    "<think>a<think>b</think> <answer>A</answer>",
    "<think>a</think></think> <answer>A</answer>",
    "<Think>a</Think> <answer>A</answer>",
]


@pytest.mark.parametrize("completion", ALSO_IN_COSMOS + NOT_IN_COSMOS)
def test_format_allows_any_space_between_blocks(completion):
    assert format(completion, asks("A")) == 1.0


@pytest.mark.parametrize("completion", WRONG)
def test_format_rejects_other_completions(completion):
    assert format(completion, asks("A")) == format(completion, asks("A"), pattern=COSMOS_FORMAT) == 0.0


@pytest.mark.parametrize(
    ("completion", "expected"), [(c, 1.0) for c in ALSO_IN_COSMOS] + [(c, 0.0) for c in NOT_IN_COSMOS]
)
def test_cosmos_pattern_requires_one_empty_line(completion, expected):
    assert format(completion, asks("A"), pattern=COSMOS_FORMAT) == expected


COSMOS_PROMPT = (
    "Which?\n(A) x\n(B) y\nAnswer with the option's letter from the given choices directly.\nPlease answer the question in "
    "the following format: <think> your reasoning </think> <answer> your answer </answer>."
)
REASON2_PROMPT = (
    "Answer in this format:\n<think>\nYour reasoning.\n</think>\n\nWrite your answer after the </think> tag."
)


def test_usual_prompt_requests_only_default_format():
    assert describe_format_problem(COSMOS_PROMPT) is None
    assert "<think> your reasoning </think> <answer>" in describe_format_problem(COSMOS_PROMPT, COSMOS_FORMAT)


def test_prompt_requesting_another_format_is_reported():
    assert "Your reasoning." in describe_format_problem(REASON2_PROMPT)
    assert "no format" in describe_format_problem("Which way does it move?")


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("left", "left", 1),
        (" Left\n", "left", 1),
        ("to the\n left", "to the left", 1),
        ("<think>it is right</think> <answer>left</answer>", "left", 1),
        ("<think>right</think>\n\nleft", "left", 1),
        ("<think><answer>right</answer></think> <answer>left</answer>", "left", 1),
        ("left", "<think>x</think> <answer>left</answer>", 1),
        ("left.", "left", 0),
        ("it is left", "left", 0),
        ("<think>left", "left", 0),
        ("", "left", 0),
        ("left", None, 0),
    ],
)
def test_exact_match_ignores_case_and_spaces(completion, answer, expected):
    assert exact_match(completion, asks(answer)) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so #### 72", "blah\n#### 72", 1),
        ("#### 1,000", "#### 1000", 1),
        ("#### -5", "#### -5", 1),
        ("#### 72.", "#### 72", 0),
        ("####72", "#### 72", 0),
        ("72", "#### 72", 0),
        ("#### 72 or #### 73", "#### 73", 0),
        ("#### 72", "72", 1),
        ("#### 1000", "1,000", 1),
        ("no number", "none either", 0),
        ("#### 72", None, 0),
    ],
)
def test_gsm8k_reward_compares_hash_numbers(completion, answer, expected):
    assert gsm8k(completion, asks(answer)) == expected


@pytest.mark.parametrize(
    ("length", "factor", "expected"),
    [(0, 1, 0), (1000, 1, 0), (1536, 1, 0), (1792, 1, -0.5), (2048, 1, -1), (3000, 1, -1), (1792, 2, -1)],
)
def test_overlong_is_linear_in_the_buffer(length, factor, expected):
    assert compute_soft_overlong(length, 2048, 512, factor=factor) == expected
    assert overlong("…", add_length(asks("A"), length, 2048), buffer=512, factor=factor) == expected


def test_default_buffer_never_penalizes_short_completion():
    assert overlong("…", add_length(asks("A"), 1638, 2048)) == 0  # 2048 - 2048 // 5 is 1639
    assert overlong("…", add_length(asks("A"), 2048, 2048)) == -1


def test_buffer_longer_than_completion_is_rejected():
    with pytest.raises(ValueError, match="4096.*2048"):
        compute_soft_overlong(0, 2048, 4096)


def test_overlong_error_names_missing_values():
    with pytest.raises(ValueError, match="completion_length and max_completion_length"):
        overlong("…", asks("A"))
