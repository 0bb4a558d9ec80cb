"""The rollouts and answers that a run's page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsreason.report.run_files import open_run
from dsreason.report.samples import (
    TextPart,
    choose_answers,
    choose_evenly,
    choose_groups,
    choose_telling,
    compare_texts,
    find_question,
    find_tags,
)
from tests.unit.report.run_folder import PROMPT, make_answer, make_completion, write_run


def test_equal_completions_are_merged(tmp_path: Path) -> None:
    rows = [make_completion(text, reward) for text, reward in (("5", 0.0), ("4", 1.0), ("5", 0.0), ("5", 0.0))]
    run = open_run(write_run(tmp_path, rollouts={0: rows}, grpo={"num_generations": 4}))
    (group,) = choose_groups(run)
    assert [(shown.row["completion"], shown.count) for shown in group.completions] == [("4", 1), ("5", 3)]
    assert group.tags == ["worst", "mixed"] and group.num_omitted == 0


def test_best_completion_is_compared_with_earlier_step(tmp_path: Path) -> None:
    rollouts = {
        0: [make_completion("It is five", 0.0)],
        7: [make_completion("It is four", 1.0), make_completion("8", 0.0, prompt="4 + 4?")],
    }
    groups = choose_groups(open_run(write_run(tmp_path, rollouts=rollouts, grpo={"num_generations": 1})))
    assert [(group.step, group.earlier_step) for group in groups] == [(7, 0), (7, None), (0, None)]
    assert groups[0].changes == [TextPart("same", "It is "), TextPart("old", "five"), TextPart("new", "four")]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], True),
        ([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}], False),
        ([{"a": 1.0, "b": None}, {"a": 0.0, "b": 1.0}], False),
    ],
)
def test_disagreeing_rewards_are_tagged(rewards: list[dict[str, float | None]], expected: bool) -> None:
    group = [make_completion("x", 0.5, rewards=scores) for scores in rewards]
    assert ("disagreeing" in find_tags(group)) == expected


def test_truncated_completion_is_tagged() -> None:
    assert find_tags([make_completion("x", 0.5, finish_reason="length")]) == ["same", "truncated"]


def test_every_kind_of_group_is_shown() -> None:
    dull = [[make_completion("x", 1.0, prompt=str(i))] for i in range(50)]
    cut = [[make_completion("x", 1.0, prompt="cut", finish_reason="length")]]
    mixed = [[make_completion("x", reward, prompt="mixed") for reward in (0.0, 1.0)]]
    chosen = [group[0]["id"] for group, _ in choose_telling(dull + cut + mixed)]
    assert len(chosen) == 8 and {"cut", "mixed"} <= {*chosen}


def test_answers_are_followed_over_validations(tmp_path: Path) -> None:
    answers = {
        0: [make_answer(0, "5", correct=False), make_answer(1, "4", correct=True), make_answer(2, "x", correct=None)],
        9: [make_answer(0, "4", correct=True), make_answer(1, "5", correct=False), make_answer(2, "y", correct=None)],
    }
    histories = choose_answers(open_run(write_run(tmp_path, answers=answers)))
    assert [(history.last["row"], history.tags) for history in histories] == [
        (0, ["gained", "right"]),
        (1, ["lost", "wrong"]),
        (2, ["ungraded"]),
    ]
    assert [*histories[0].answers] == [0, 9]


def test_question_is_last_user_turn() -> None:
    assert find_question(PROMPT.format("<|vision_start|><|video_pad|><|vision_end|>2 + 2?")) == "2 + 2?"
    assert find_question("no template") == "no template"


def test_equal_texts_have_no_changes() -> None:
    assert compare_texts("It is four.", "It is four.") == [TextPart("same", "It is four.")]


def test_steps_are_chosen_evenly() -> None:
    assert choose_evenly(range(11), 3) == [0, 5, 10]
    assert choose_evenly([4], 3) == [4]
