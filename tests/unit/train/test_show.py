"""Metrics of a rollout, computed from hand-made rows."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.train.grpo.show import compute_reward_means, summarise


def row(
    reward: float | None, length: int, finish: str = "stop", trained: bool = True, source: str | None = None
) -> dict[str, Any]:
    return {
        "reward": reward,
        "rewards": {"right": reward},
        "data_source": source,
        "length": length,
        "finish_reason": finish,
        "trained": trained,
    }


def test_metrics_include_untrained_completions() -> None:
    rows = [row(1, 4), row(0, 8, "length"), row(1, 2, trained=False), row(1, 2, trained=False)]
    assert summarise(rows, num_generations=2) == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": 0.4330127,
            "reward/zero_std_fraction": 0.5,
            "reward/right/mean": 0.75,
            "reward/right/std": 0.4330127,
            "completion/length_mean": 4.0,
            "completion/length_max": 8.0,
            "completion/truncated_fraction": 0.25,
            "rollout/trained_fraction": 0.5,
        }
    )


def test_missing_rewards_do_not_count_in_means() -> None:
    metrics = summarise([row(1, 4), row(None, 4), row(0, 4), row(0, 4), row(None, 4), row(None, 4)], num_generations=2)
    assert metrics["reward/mean"] == metrics["reward/right/mean"] == pytest.approx(1 / 3)
    assert metrics["reward/none_fraction"] == metrics["reward/right/none_fraction"] == 0.5
    assert metrics["reward/std"] == pytest.approx(0.4714045)
    assert (
        metrics["reward/zero_std_fraction"] == 1.0
    )  # the groups: one completion with a reward, equal rewards, no rewards


def test_rewards_are_averaged_per_data_source() -> None:
    metrics = summarise([row(1, 4, source="a"), row(0, 4, source="a"), row(0.5, 4, source="b/c")], num_generations=1)
    means = {key: value for key, value in metrics.items() if key.startswith("reward/") and "mean" in key}
    assert means == {
        "reward/mean": 0.5,
        "reward/mean/a": 0.5,
        "reward/mean/b/c": 0.5,
        "reward/right/mean": 0.5,
        "reward/right/mean/a": 0.5,
        "reward/right/mean/b/c": 0.5,
    }


def test_rollout_without_any_reward_has_no_mean() -> None:
    metrics = summarise([row(None, 4)], num_generations=1)
    assert {key for key in metrics if key.startswith("reward/")} == {
        "reward/zero_std_fraction",
        "reward/none_fraction",
        "reward/right/none_fraction",
    }


def test_empty_rollout_has_no_metrics() -> None:
    assert summarise([], num_generations=2) == {}


def test_reward_measures_are_averaged_across_ranks() -> None:
    sums = [{"judge/words": (30.0, 3)}, {"judge/words": (2.0, 1), "judge/tone": (1.0, 2)}, {}]
    assert compute_reward_means(sums) == {"reward/judge/words": 8.0, "reward/judge/tone": 0.5}
