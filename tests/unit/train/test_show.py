"""Numbers of a rollout, from hand-made rows."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.train.grpo.show import compute_reward_means, summarise


def row(reward: float, length: int, finish: str = "stop", trained: bool = True) -> dict[str, Any]:
    return {
        "reward": reward,
        "rewards": {"right": reward},
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


def test_empty_rollout_has_no_metrics() -> None:
    assert summarise([], num_generations=2) == {}


def test_reward_measures_are_averaged_across_ranks() -> None:
    sums = [{"judge/words": (30.0, 3)}, {"judge/words": (2.0, 1), "judge/tone": (1.0, 2)}, {}]
    assert compute_reward_means(sums) == {"reward/judge/words": 8.0, "reward/judge/tone": 0.5}
