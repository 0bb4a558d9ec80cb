from __future__ import annotations

import re

import pytest

from dsreason.config.schema import OptimConfig
from dsreason.engine.schedule import compute_lr_factor, count_warmup_steps, describe_long_warmup


def factors(total: int, **optim: object) -> list[float]:
    return [compute_lr_factor(step, total, OptimConfig.model_validate(optim)) for step in range(total)]


WARMUP_4 = [0, 1 / 3, 2 / 3, 1]


@pytest.mark.parametrize(
    ("schedule", "decay"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("linear", [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", [1, 0.9330, 0.75, 0.5, 0.25, 0.0670]),
        ("sqrt", [1, 0.5918, 0.4226, 0.2929, 0.1835, 0.0871]),
        ("wsd", [1, 1, 1, 1, 1, 1 - 0.5**0.5]),  # the decay covers the last fifth of 10 steps: steps 8 and 9
    ],
)
def test_schedules_match_values_for_ten_steps(schedule: str, decay: list[float]) -> None:
    assert factors(10, warmup=4, schedule=schedule) == pytest.approx(WARMUP_4 + decay, abs=5e-5)


def test_minimum_rate_affects_decay_but_not_warmup() -> None:
    linear = factors(10, warmup=4, schedule="linear", min_lr_share=0.1)
    assert linear == pytest.approx(WARMUP_4 + [0.1 + 0.9 * share / 6 for share in (6, 5, 4, 3, 2, 1)])


def test_decay_ends_at_minimum_learning_rate() -> None:
    for schedule in ("linear", "cosine", "sqrt", "wsd"):
        optim = OptimConfig(warmup=2, schedule=schedule, min_lr_share=0.25)
        assert compute_lr_factor(10, 10, optim) == pytest.approx(0.25)
        assert compute_lr_factor(99, 10, optim) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("warmup", "total", "steps"), [(0.4, 10, 4), (0.07, 100, 7), (0.03, 10, 0), (0, 10, 0), (1, 10, 1), (30.0, 10, 10)]
)
def test_warmup_below_one_is_fraction_of_steps(warmup: float, total: int, steps: int) -> None:
    assert count_warmup_steps(total, OptimConfig(warmup=warmup)) == steps


@pytest.mark.parametrize("warmup", [0, 1])
def test_first_step_has_full_rate_without_warmup(warmup: int) -> None:
    assert factors(4, warmup=warmup, schedule="linear")[0] == 1.0


def test_warmup_longer_than_run_is_clipped() -> None:
    assert factors(3, warmup=5) == factors(3, warmup=3) == [0, 0.5, 1]


@pytest.mark.parametrize(
    ("warmup", "note"),
    [
        (9, None),
        (0.94, None),  # 9.4 steps
        (
            10,
            r"optim.warmup \(10 steps\) is as long as the run \(10 steps\), so optim.lr is reached only in the last step",
        ),
        (0.96, r"optim.warmup \(0.96 of the run's steps\) is as long as the run \(10 steps\)"),
        (20, r"optim.warmup \(20 steps\) is longer than the run \(10 steps\) and is clipped to it"),
    ],
)
def test_warmup_that_takes_whole_run_is_reported(warmup: float, note: str | None) -> None:
    result = describe_long_warmup(10, OptimConfig(warmup=warmup))
    assert result is None if note is None else result is not None and re.match(note, result)


def test_single_step_run_has_nonzero_rate() -> None:
    assert factors(1, warmup=0.03) == [1.0]


def test_wsd_decay_starts_after_warmup() -> None:
    assert factors(4, warmup=3, schedule="wsd", decay_share=1.0) == [0, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]), ("sqrt", [0, 1, 1, 1, 1, 1, 1, 0.5, 0.292893, 0.133975])],
)
def test_decay_share_holds_rate_before_decay(schedule: str, expected: list[float]) -> None:
    result = [
        compute_lr_factor(step, 10, OptimConfig(warmup=2, schedule=schedule, decay_share=0.4)) for step in range(10)
    ]
    assert result == pytest.approx(expected, abs=1e-6)


def test_wsd_decays_over_last_fifth_by_default() -> None:
    assert [compute_lr_factor(step, 10, OptimConfig(warmup=0, schedule="wsd")) for step in (7, 8, 9)] == pytest.approx(
        [1, 1, 1 - 0.5**0.5]
    )


def test_warmup_starts_at_given_share() -> None:
    """Published values of VideoPhy-2: 5 warmup steps from 0.05, then a cosine to 0.1, in 50 steps."""
    optim = OptimConfig(warmup=5, warmup_start=0.05, min_lr_share=0.1)
    assert [compute_lr_factor(step, 50, optim) for step in (0, 1, 4, 5, 20, 50)] == pytest.approx(
        [0.05, 0.2875, 1.0, 1.0, 0.775, 0.1]  # a third of the decay: 0.1 + 0.9 * (1 + cos 60°) / 2
    )


def test_schedule_length_replaces_run_length() -> None:
    short, long = OptimConfig(warmup=50, schedule_steps=950), OptimConfig(warmup=0, schedule_steps=10, min_lr_share=0.2)
    assert compute_lr_factor(500, 500, short) == pytest.approx(0.5)
    assert [compute_lr_factor(step, 500, long) for step in (5, 10, 499)] == pytest.approx([0.6, 0.2, 0.2])


def test_warmup_beyond_run_reports_last_rate() -> None:
    optim = OptimConfig(warmup=1000, warmup_start=0.05, schedule_steps=1000)
    assert compute_lr_factor(499, 500, optim) == pytest.approx(0.05 + 0.95 * 499 / 999)
    note = describe_long_warmup(500, optim)
    assert note is not None
    assert "longer than the run (500 steps), which ends at 0.525 of optim.lr" in note
