"""Results of a run: start, best and end, with intervals."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy.stats import binomtest, t

from dsreason.report.outcome import Measurement, Outcome, measure_outcomes
from dsreason.report.run_files import open_run
from dsreason.report.summary import describe_outcome, describe_run
from tests.unit.report.run_folder import make_answer, make_completion, write_run


def test_accuracy_has_wilson_interval(tmp_path: Path) -> None:
    metrics = [{"step": step, "val/accuracy": value} for step, value in ((0, 0.25), (5, 1.0), (10, 0.75))]
    answers = {
        step: [make_answer(i, "4", correct=i < count) for i in range(4)] for step, count in ((0, 1), (5, 4), (10, 3))
    }
    (outcome,) = measure_outcomes(open_run(write_run(tmp_path, metrics=metrics, answers=answers)))
    assert (outcome.name, outcome.source) == ("accuracy", "4 held-out rows")
    assert (outcome.start.value, outcome.best.step, outcome.end.step) == (0.25, 5, 10)
    expected = binomtest(3, 4).proportion_ci(0.95, method="wilson")
    assert outcome.end.interval == pytest.approx((expected.low, expected.high))
    assert outcome.verdict == "unclear"  # 4 rows do not suffice


def test_rollout_reward_is_clustered_by_prompt(tmp_path: Path) -> None:
    def rollout(*rewards: float) -> list[dict]:
        return [make_completion("4", reward, prompt=f"{i // 2}") for i, reward in enumerate(rewards)]

    rollouts = {0: rollout(0, 0, 1, 1), 9: rollout(1, 1, 1, 0)}
    metrics = [{"step": step, "reward/mean": value} for step, value in ((1, 0.5), (10, 0.75))]
    run = open_run(write_run(tmp_path, metrics=metrics, rollouts=rollouts, grpo={"num_generations": 2}))
    (outcome,) = measure_outcomes(run)
    assert (outcome.start, outcome.end.value) == (Measurement(0, 0.5, outcome.start.interval), 0.75)
    # Two prompts with means 0 and 1: the standard error of their mean is 0.5, with one degree of freedom.
    reach = 0.5 * t.ppf(0.975, 1)
    assert outcome.start.interval == pytest.approx((0.5 - reach, 0.5 + reach))
    assert outcome.source == "2 prompts of a rollout"


def test_training_loss_is_used_without_validation(tmp_path: Path) -> None:
    metrics = [{"step": step, "train/loss": value} for step, value in ((1, 3.0), (2, 1.0), (3, 2.0))]
    (outcome,) = measure_outcomes(open_run(write_run(tmp_path, metrics=metrics)))
    assert (outcome.start.value, outcome.best.value, outcome.end.value) == (3.0, 1.0, 2.0)
    assert outcome.verdict == "better"


@pytest.mark.parametrize(
    ("start", "end", "higher_is_better", "verdict"),
    [
        (Measurement(0, 0.2, (0.1, 0.3)), Measurement(9, 0.5, (0.4, 0.6)), True, "better"),
        (Measurement(0, 0.2, (0.1, 0.3)), Measurement(9, 0.5, (0.4, 0.6)), False, "worse"),
        (Measurement(0, 0.2, (0.1, 0.45)), Measurement(9, 0.5, (0.4, 0.6)), True, "unclear"),
        (Measurement(0, 2.0), Measurement(9, 1.0), False, "better"),
        (Measurement(0, 2.0), Measurement(9, 2.0), True, "unchanged"),
    ],
)
def test_verdict_depends_on_overlap(start: Measurement, end: Measurement, higher_is_better: bool, verdict: str) -> None:
    assert Outcome("reward", "rows", start, end, end, higher_is_better).verdict == verdict


def test_outcome_is_described_in_one_line() -> None:
    start, end = Measurement(0, 0.547, (0.486, 0.607)), Measurement(60, 0.914)
    text = describe_outcome(Outcome("accuracy", "256 held-out rows", start, end, end, higher_is_better=True))
    assert text == "accuracy 0.547 (0.486 to 0.607) at step 0, 0.914 at step 60: better (256 held-out rows)"


def test_summary_repeats_warnings_and_names_next_command(tmp_path: Path) -> None:
    line = "2026-11-28 05:46:09 rank 0 step 3 WARNING dsreason.train.common.learning: all rewards are equal\n"
    noise = "2026-11-28 05:46:09 rank 0 WARNING py.warnings: something of a library\n"
    run = open_run(write_run(tmp_path / "my run", metrics=[{"step": 1, "train/loss": 1.0}], log=line + noise + line))
    lines = describe_run(run)
    assert lines[1:] == [
        "warning (2 times): all rewards are equal",
        f"next: dsreason grpo --config=run.toml --output-dir '{tmp_path}/my run' --resume auto",
    ]
    (tmp_path / "my run/export/final").mkdir(parents=True)
    assert describe_run(run)[-1].startswith("next: dsreason push ")
