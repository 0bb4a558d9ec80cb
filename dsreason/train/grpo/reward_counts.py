"""Counts that show whether a policy can learn from its rollouts' rewards, and warnings based on these counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.losses.objective import build_objective
from dsreason.rewards import BUILT_IN

MOST = 0.9
"""Share of groups without signal, or of truncated completions, from which a warning is logged."""
OFTEN = 0.05
"""Share of calls that time out, or number of retried requests per completion, from which a warning is logged."""
BEST_SCORES = dict.fromkeys(BUILT_IN, 1.0) | {"overlong": 0.0}
"""Highest possible score for each built-in reward. If all completions get it, the policy has learned the reward."""


@dataclass(frozen=True)
class ScoreCounts:
    """Number and range of a reward function's scores (excluding None), and how many of its calls timed out or were
    retried."""

    number: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    timeouts: int = 0
    """Number of calls that exceeded the time limit and got a fixed score instead."""
    retries: int = 0
    """Number of requests to a server that failed and were retried."""

    def __add__(self, other: ScoreCounts) -> ScoreCounts:
        return ScoreCounts(
            self.number + other.number,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
            self.timeouts + other.timeouts,
            self.retries + other.retries,
        )

    @property
    def is_constant(self) -> bool:
        return self.number > 1 and self.lowest == self.highest


@dataclass(frozen=True)
class RolloutCounts:
    """Counts over all ranks that show whether the policy can learn from the rewards of one or more rollouts.

    Example: two completions of one prompt that scored 0 and 1 and were trained on are `RolloutCounts(rollouts=1,
    groups=1, groups_without_signal=0, truncated=0, learned=2, total=ScoreCounts(2, 0, 1), by_function={"format":
    ScoreCounts(2, 0, 1)})`.
    """

    rollouts: int
    groups: int
    groups_without_signal: int
    """Number of groups in which all rewards are equal or no completion has a reward."""
    truncated: int
    """Number of completions cut off at the maximum length."""
    learned: int
    """Number of completions used for training with an advantage other than 0."""
    total: ScoreCounts
    """Counts for the completions' total rewards, which are weighted sums of the scores."""
    by_function: dict[str, ScoreCounts]
    """Name of the reward function → counts for its scores; empty if there are no rewards or no completions."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        names = dict.fromkeys([*self.by_function, *other.by_function])
        parts = (self.by_function, other.by_function)
        return RolloutCounts(
            self.rollouts + other.rollouts,
            self.groups + other.groups,
            self.groups_without_signal + other.groups_without_signal,
            self.truncated + other.truncated,
            self.learned + other.learned,
            self.total + other.total,
            {name: parts[0].get(name, ScoreCounts()) + parts[1].get(name, ScoreCounts()) for name in names},
        )


def count_rewards(
    rows: Sequence[Mapping[str, Any]], reward_sums: Sequence[Mapping[str, tuple[float, int]]], config: GRPOConfig
) -> RolloutCounts:
    """Build the `RolloutCounts` for one rollout.

    Args:
        rows: completions from all ranks (`show.describe`); completions of the same prompt must be adjacent.
        reward_sums: additional metrics from the reward functions on all ranks (`CompletionScores.metric_sums`).
    """
    objective, size = build_objective(config.grpo), config.grpo.num_generations
    tolerance = config.grpo.dynamic_tolerance if objective.dynamic_sampling else 0.0
    rewards = [row["reward"] for row in rows]
    groups = [select_existing(rewards[first : first + size]) for first in range(0, len(rewards), size)]
    is_trained = [
        row["trained"] and not (objective.overlong_filter and row["finish_reason"] == "length") for row in rows
    ]
    by_function: dict[str, ScoreCounts] = {}
    for name in dict.fromkeys(name for row in rows for name in row["rewards"]):
        scores = select_existing([row["rewards"].get(name) for row in rows])
        timeouts, retries = (
            round(sum(sums[key][0] for sums in reward_sums if key in sums))
            for key in (f"{name}/timeouts", f"{name}/retries")
        )
        by_function[name] = replace(count_scores(scores), timeouts=timeouts, retries=retries)
    return RolloutCounts(
        rollouts=1,
        groups=len(groups),
        groups_without_signal=sum(not group or max(group) - min(group) <= tolerance for group in groups),
        truncated=sum(row["finish_reason"] == "length" for row in rows),
        learned=sum(trained and row["advantage"] != 0 for trained, row in zip(is_trained, rows, strict=True)),
        total=count_scores(select_existing(rewards)),
        by_function=by_function,
    )


def select_existing(scores: Sequence[float | None]) -> list[float]:
    return [score for score in scores if score is not None]


def count_scores(scores: Sequence[float]) -> ScoreCounts:
    return ScoreCounts(len(scores), min(scores, default=math.inf), max(scores, default=-math.inf))


def find_reward_problems(counts: RolloutCounts, config: GRPOConfig) -> dict[str, str]:
    """Return a warning for each problem that the counts reveal, keyed by the kind of problem."""
    if not counts.by_function:
        return {}
    problems, rollouts = {}, f"{counts.rollouts} rollout{'s' * (counts.rollouts > 1)}"
    if counts.groups_without_signal >= MOST * counts.groups:
        problems["groups"] = (
            f"grpo: in {counts.groups_without_signal} of {counts.groups} groups ({rollouts}) all completions scored the "
            f"same, so nothing was learned from them; {advise_on_equal_groups(counts, config)}"
        )
    num_completions = counts.groups * config.grpo.num_generations
    if counts.truncated >= MOST * num_completions:
        problems["truncated"] = (
            f"grpo: {counts.truncated} of {num_completions} completions ({rollouts}) were cut off at "
            f"rollout.max_completion_length ({config.rollout.max_completion_length}), probably before their answer; raise "
            "it, or request shorter answers in data.system_prompt"
        )
    for name, scores in counts.by_function.items():
        if not scores.number:  # the function applied to no completion
            continue
        is_learned = scores.lowest == BEST_SCORES.get(name)
        if scores.is_constant and not counts.total.is_constant and not is_learned:
            problems[f"constant {name}"] = (
                f"grpo: reward {name} gave {scores.lowest:g} to all {scores.number} completions ({rollouts}), so it did not "
                "tell good completions from bad ones; check it with `dsreason reward try`, unless this is its best score"
            )
        if scores.timeouts >= OFTEN * scores.number:
            problems[f"timeouts {name}"] = (
                f"grpo: reward {name} exceeded reward.time_limit ({config.reward.time_limit:g} s) in {scores.timeouts} of "
                f"{scores.number} calls ({rollouts}), which got a fixed score; raise the limit, or make the function faster"
            )
        if scores.retries >= OFTEN * scores.number:
            problems[f"retries {name}"] = (
                f"grpo: {scores.retries} requests of reward {name} failed and were repeated, for {scores.number} completions "
                f"({rollouts}); look at the server's log and load, or lower reward.workers"
            )
    return problems


def advise_on_equal_groups(counts: RolloutCounts, config: GRPOConfig) -> str:
    """Return the likely reason why all completions of a group score the same, and what to do about it."""
    total = counts.total
    if not total.number:
        return "no reward applied to any completion: check reward.only and which rows the functions return None for"
    if not total.is_constant:
        dynamic = "" if build_objective(config.grpo).dynamic_sampling else ", or set grpo.dynamic_sampling = true"
        return (
            f"the scores ({total.lowest:g} to {total.highest:g}) differ only between prompts: use rows that the model "
            f"sometimes answers correctly, or raise grpo.num_generations or rollout.temperature{dynamic}"
        )
    if total.highest > 0:
        return (
            f"every completion scored {total.highest:g}: use harder rows if this is the best score, and otherwise check "
            "reward.functions with `dsreason reward try`"
        )
    return (
        f"every completion scored {total.highest:g}: check reward.functions with `dsreason reward try` and the answer format "
        "in data.system_prompt, or use easier rows"
    )
