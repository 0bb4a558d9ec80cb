"""Counts of hand-made scored groups, and the problems that they reveal."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.train.grpo.reward_counts import RolloutCounts, ScoreCounts, count_rewards, find_reward_problems


def make_config(**grpo: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "reward": {"functions": {"format": 1.0}, "time_limit": 3},
            "rollout": {"max_completion_length": 9},
            "grpo": {"preset": "dr_grpo", "num_generations": 2, **grpo},
        }
    )


def row(advantage: float, finish: str = "stop", *, trained: bool = True, **rewards: float) -> dict[str, Any]:
    return {
        "reward": sum(rewards.values()),
        "rewards": rewards,
        "advantage": advantage,
        "trained": trained,
        "finish_reason": finish,
    }


def count(rows: list[dict[str, Any]], **grpo: Any) -> RolloutCounts:
    return count_rewards(rows, [], make_config(**grpo))


def test_groups_and_scores_are_counted_over_ranks() -> None:
    rows = [row(0.5, right=1, short=0.5), row(-0.5, "length", right=0, short=0.5)]  # rank 0
    rows += [row(0.0, right=0, short=0.5), row(0.0, right=0, short=0.5)]  # rank 1
    sums = [
        {"right/timeouts": (1.0, 2), "right/words": (9.0, 2)},
        {"right/timeouts": (2.0, 2), "short/retries": (4.0, 2)},
    ]
    assert count_rewards(rows, sums, make_config()) == RolloutCounts(
        rollouts=1,
        groups=2,
        groups_without_signal=1,
        truncated=1,
        learned=2,
        total=ScoreCounts(4, 0.5, 1.5),
        by_function={"right": ScoreCounts(4, 0, 1, timeouts=3), "short": ScoreCounts(4, 0.5, 0.5, retries=4)},
    )


def test_reward_counts_add_up_over_rollouts() -> None:
    first = count([row(0.5, right=1), row(-0.5, right=0)])
    second = count([row(0, "length", right=2, late=1), row(0, "length", right=2, late=1)])
    assert first + count([]) + second == RolloutCounts(
        rollouts=3,
        groups=2,
        groups_without_signal=1,
        truncated=2,
        learned=2,
        total=ScoreCounts(4, 0, 3),
        by_function={"right": ScoreCounts(4, 0, 2), "late": ScoreCounts(2, 1, 1)},
    )


@pytest.mark.parametrize(
    ("grpo", "learned", "without_signal"),
    [
        ({}, 2, 0),
        ({"overlong_filter": True}, 1, 0),
        ({"dynamic_sampling": True, "dynamic_tolerance": 0.5}, 2, 0),
        ({"dynamic_sampling": True, "dynamic_tolerance": 1.0}, 2, 1),
    ],
)
def test_filtered_rollouts_do_not_count_as_learned(grpo: dict[str, Any], learned: int, without_signal: int) -> None:
    counts = count([row(0.5, right=1), row(-0.5, "length", right=0)], **grpo)
    assert (counts.learned, counts.groups_without_signal) == (learned, without_signal)


def test_untrained_groups_do_not_count_as_learned() -> None:
    assert count([row(0.0, trained=False, right=1), row(0.0, trained=False, right=0)]).learned == 0


def find(rows: list[dict[str, Any]], **grpo: Any) -> dict[str, str]:
    return find_reward_problems(count(rows, **grpo), make_config(**grpo))


def test_healthy_groups_have_no_problem() -> None:
    rows = [row(0.5, right=1, short=1, format=1, overlong=0), row(-0.5, right=0, short=0, format=1, overlong=0)]
    assert find(rows) == {}  # format and overlong always give their best score
    assert find([]) == find([row(0), row(0)]) == {}  # no completions, or a teacher without rewards


@pytest.mark.parametrize(
    ("rewards", "cause"),
    [
        (
            [0, 0, 0, 0],
            "every completion scored 0: check reward.functions with `dsreason reward try` and the answer format",
        ),
        ([-1, -1, -1, -1], "every completion scored -1: check reward.functions"),
        ([1, 1, 1, 1], "every completion scored 1: use harder rows if this is the best score"),
        (
            [0, 0, 1, 1],
            "the scores (0 to 1) differ only between prompts: use rows that the model sometimes answers correctly",
        ),
    ],
)
def test_equal_groups_are_reported_with_cause(rewards: list[float], cause: str) -> None:
    problems = find([row(0, right=reward) for reward in rewards])
    assert list(problems) == ["groups"]
    text = "grpo: in 2 of 2 groups (1 rollout) all completions scored the same, so nothing was learned from them; "
    assert problems["groups"].startswith(text + cause)


def test_dynamic_sampling_is_suggested_once() -> None:
    rows = [row(0, right=reward) for reward in (0, 0, 1, 1)]
    assert find(rows)["groups"].endswith("rollout.temperature, or set grpo.dynamic_sampling = true")
    assert find(rows, dynamic_sampling=True)["groups"].endswith("rollout.temperature")


@pytest.mark.parametrize(("num_equal", "reported"), [(8, False), (9, True)])
def test_few_informative_groups_prevent_warning(num_equal: int, reported: bool) -> None:
    rows = [row(0, right=0)] * 2 * num_equal + [row(0.5, right=1), row(-0.5, right=0)] * (10 - num_equal)
    assert ("groups" in find(rows)) is reported


def test_truncated_completions_are_reported() -> None:
    problems = find([row(0.5, "length", right=1), row(-0.5, "length", right=0)])
    assert list(problems) == ["truncated"]
    text = "grpo: 2 of 2 completions (1 rollout) were cut off at rollout.max_completion_length (9), probably"
    assert problems["truncated"].startswith(text)


def test_constant_function_among_several_is_reported() -> None:
    problems = find([row(0.5, right=1, short=1), row(-0.5, right=0, short=1)])
    assert list(problems) == ["constant short"]
    assert problems["constant short"].startswith("grpo: reward short gave 1 to all 2 completions (1 rollout), so")


def test_constant_built_in_below_best_is_reported() -> None:
    assert list(find([row(0.5, right=1, format=0), row(-0.5, right=0, format=0)])) == ["constant format"]


@pytest.mark.parametrize(
    ("counts", "kind", "text"),
    [
        (
            ScoreCounts(40, 0, 1, timeouts=2),
            "timeouts maths",
            "grpo: reward maths exceeded reward.time_limit (3 s) in 2 of 40 calls (10 rollouts), which got a fixed score;",
        ),
        (
            ScoreCounts(40, 0, 1, retries=2),
            "retries maths",
            "grpo: 2 requests of reward maths failed and were repeated, for 40 completions (10 rollouts);",
        ),
        (ScoreCounts(41, 0, 1, timeouts=2, retries=2), None, ""),
    ],
)
def test_frequent_timeouts_and_retries_are_reported(counts: ScoreCounts, kind: str | None, text: str) -> None:
    rollouts = RolloutCounts(10, 20, 0, 0, 40, ScoreCounts(counts.number, 0, 1), {"maths": counts})
    problems = find_reward_problems(rollouts, make_config())
    assert list(problems) == ([kind] if kind else [])
    assert "".join(problems.values()).startswith(text)


def test_missing_scores_are_not_counted() -> None:
    missing = {**row(0.0), "reward": None, "rewards": {"right": None, "short": None}}
    one_short = {**row(0.5, right=1), "rewards": {"right": 1.0, "short": None}}
    counts = count([one_short, missing, missing, missing])
    assert (counts.total, counts.groups_without_signal) == (ScoreCounts(1, 1, 1), 2)
    assert counts.by_function == {"right": ScoreCounts(1, 1, 1), "short": ScoreCounts()}


def test_rollout_without_any_reward_is_explained() -> None:
    missing = {**row(0.0), "reward": None, "rewards": {"right": None}}
    problems = find([missing, missing])
    assert list(problems) == ["groups"]
    assert "no reward applied to any completion: check reward.only" in problems["groups"]
