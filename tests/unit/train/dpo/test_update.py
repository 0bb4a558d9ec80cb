"""Metrics of a step's pairs, BCO's running baseline, and the warning about falling probabilities."""

from __future__ import annotations

import math
import random

import pytest

from dsreason.config.schema_dpo import PreferenceConfig
from dsreason.train.dpo.update import WINDOW, Baseline, ChosenWatch, build_settings, compute_pair_metrics
from tests.unit.losses.test_preference import PAIRS, make_pairs


def test_metrics_are_means_over_pairs() -> None:
    metrics = compute_pair_metrics(
        PAIRS, PreferenceConfig(sft_weight=0.5), build_settings(PreferenceConfig(), Baseline())
    )
    assert metrics == pytest.approx(
        {
            "loss": (0.6587596 + 0.6931472) / 2,
            "total": (0.6587596 + 0.6931472) / 2 + 0.5 * 2.45,
            "margin": 0.035,
            "accuracy": 0.5,  # a margin of 0 is no preference
            "ranking": 0.5,  # -10 > -11, and -12 < -9
            "chosen": 0.5,
            "rejected": (-0.2 + 0.5) / 2,
            "chosen_nll": 2.45,
            "chosen_length": 4.5,
            "rejected_length": 3.0,
        },
        abs=1e-7,
    )


def test_baseline_is_mean_reward_of_earlier_answers() -> None:
    baseline = Baseline()
    assert baseline.mean == 0
    baseline.add(PAIRS, 0.1)  # rewards .05, .05, -.02, .05
    assert baseline.mean == pytest.approx(0.13 / 4)
    baseline.add(make_pairs([-1.0], [-3.0]), 0.1)
    assert baseline.mean == pytest.approx((0.13 - 0.4) / 6)


def test_baseline_does_not_depend_on_pair_order() -> None:
    values = [random.Random(0).uniform(-1e3, 1e3) for _ in range(64)]
    result = set()
    for seed in range(5):
        shuffled = random.Random(seed).sample(values, len(values))
        baseline = Baseline()
        baseline.add(make_pairs(shuffled, shuffled), 0.1)
        result.add(baseline.total)
    assert len(result) == 1


def test_nonfinite_reward_does_not_change_baseline() -> None:
    baseline = Baseline(0.5, 2)
    baseline.add(make_pairs([math.nan, -1.0], [-2.0, -2.0]), 0.1)
    assert baseline == Baseline(0.5, 2)


@pytest.mark.parametrize(
    ("chosen", "accuracy", "warns"),
    [
        (lambda i: -0.1 * i, lambda i: 0.5 + i / 100, True),
        (lambda i: 0.1 * i, lambda i: 0.5 + i / 100, False),  # the chosen answers rise
        (lambda i: 5 - 0.1 * i, lambda i: 0.5 + i / 100, False),  # still more probable than under the reference
        (
            lambda i: -0.1 * i,
            lambda i: 0.9 - i / 100,
            False,
        ),  # the accuracy also falls, which is visible without a warning
        (lambda i: -0.1 * i if i else math.nan, lambda i: 0.5 + i / 100, True),
    ],
)
def test_falling_chosen_answers_are_reported_once(chosen, accuracy, warns) -> None:
    watch = ChosenWatch()
    message = [watch.record(chosen(i), accuracy(i)) for i in range(2 * WINDOW)]
    assert not any(message[: WINDOW - 1])
    assert sum(text is not None for text in message) == warns
    if warns:
        text = next(filter(None, message))
        assert "dpo/chosen fell from" in text
        assert "raise dpo.sft_weight" in text
