"""Rewards, validation and evaluation read and grade every response in the same way.

`DISPUTED` holds responses that they once read differently: several `<answer>` blocks, unclosed thoughts, an option that
the text rejects, verdicts after other letters.
"""

from __future__ import annotations

import pytest

from dsreason.answers.correct import is_correct
from dsreason.config.schema_eval import EvaluationConfig
from dsreason.data.types import Sample
from dsreason.evaluation import parse
from dsreason.evaluation.questions.grading import Grader
from dsreason.evaluation.types import Question
from dsreason.rewards import exact_match, ordinal_choice, single_choice, single_choice_lenient

OPTIONS = {"A": "to the left", "B": "to the right", "C": "a car", "D": "A car and B"}

DISPUTED = [
    ("<answer>A</answer><answer>B</answer>", "B"),
    ("<answer>A</answer> Wait. <answer>B</answer> <answer>", "B"),
    ("<answer>A</answer> <answer>B and A</answer>", None),
    ("<answer>A</answer> <answer>left</answer>", None),
    ("<Answer>B</Answer>", "B"),
    ("<answer>B", "B"),
    ("<think>x <answer>B</answer>", "B"),
    ("<think>x The answer is (B).", None),
    ("<think>x option B", None),
    ("(A) is wrong", None),
    ("I rule out option A.", None),
    ("I don't think the answer is A.", None),
    ("The answer is A or the answer is B", None),
    ("A. to the left\nB. to the right", None),
    ("A. to the left\nNo, it is B", None),
    ("A) to the right\nA", None),
    ("A. to the left, B. to the right, C. a car. The answer is B.", "B"),
    ("C\n\nThe shape is a car, unlike option A.", "C"),
    ("It turns.\nB.", "B"),
    ("The answer is B, not A.", "B"),
    ("The answer is most likely (b).", "B"),
    ("B is correct", "B"),
    ("Based on the video, (b).", "B"),
    ('{"answer": "B"}', "B"),
    ("（Ｂ）", "B"),
    (r"\boxed{A}, no, \boxed{B}", "B"),
    ("B because it turns", "B"),
]
UNDISPUTED = [
    ("B", "B"),
    ("(b)", "B"),
    ("<think>It is A.</think> <answer>B</answer>", "B"),
    ("<think>A</think>\n\nB. to the right", "B"),
    ("To the right.", "B"),
    ("A or B", None),
    ("A bird", None),
    ("", None),
]


def verdicts(completion: str, letter: str, options: dict[str, str] | None) -> dict[str, bool]:
    messages = [{"role": "user", "content": "?"}]
    sample = Sample("7", messages, letter, options, {"question_kind": "multiple_choice"})
    question = Question("d/7/0", "d", "7", "multiple_choice", sample, letter, options)
    return {
        "reward": single_choice_lenient(completion, sample) == 1.0,
        "validation": is_correct(completion, sample),
        "evaluation": Grader(EvaluationConfig(answer_type="reasoning")).grade(question, completion).is_correct,
        "evaluation of letters": Grader(EvaluationConfig(answer_type="letter")).grade(question, completion).is_correct,
    }


@pytest.mark.parametrize(("completion", "named"), DISPUTED + UNDISPUTED)
def test_all_readers_accept_the_same_option(completion, named):
    for letter in OPTIONS:
        assert set(verdicts(completion, letter, OPTIONS).values()) == {letter == named}, letter


@pytest.mark.parametrize(
    ("completion", "named"),
    [
        ("(c)", "C"),
        ("C. left", "C"),
        ("A left", None),
        ("U.S. troops", None),
        ("e.g. the car", None),
        ("İ", None),
        ("r. The answer is A", "A"),
    ],
)
def test_all_graders_agree_on_questions_without_options(completion, named):
    for letter in "ACEIRU":
        assert set(verdicts(completion, letter, None).values()) == {letter == named}, letter


@pytest.mark.parametrize("completion", [completion for completion, _ in DISPUTED + UNDISPUTED])
@pytest.mark.parametrize("reference", ["A", "b", "left", "to  the right", "To the right."])
def test_exact_match_matches_answer_parsed_by_evaluation(completion, reference):
    answer = parse(completion, "reasoning", kind="open").answer
    matches = exact_match(completion, Sample("7", [], reference)) == 1.0
    assert matches == (answer.casefold().split() == reference.casefold().split())


def test_exact_match_rejects_answer_with_full_stop():
    sample = Sample("7", [{"role": "user", "content": "?"}], "red car")
    assert is_correct("Red  car.", sample)
    assert [exact_match(text, sample) for text in ("Red  car.", "Red  car")] == [0, 1]


@pytest.mark.parametrize("reward", [single_choice, ordinal_choice])
def test_cosmos_rl_rewards_read_only_first_block(reward):
    """Compare the first block verbatim, which is stricter than evaluation unless a completion corrects itself."""
    settings = {
        "<answer> b </answer>": 1,
        "<answer>(B)</answer>": 0,
        "<answer>B. to the right</answer>": 0,
        "<think>A</think> B": 0,
        "<answer>B</answer><answer>A</answer>": 1,
        "<answer>A</answer><answer>B</answer>": 0,
    }
    assert {text: reward(text, Sample("7", [], answer="B")) for text in settings} == settings
