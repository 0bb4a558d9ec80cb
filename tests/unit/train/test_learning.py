"""Warnings about runs that cannot learn: when they appear, and the summary at the end of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.config.schema import SFTConfig
from dsreason.errors import NothingLearned
from dsreason.job.failures import build_failure
from dsreason.train.common.global_batches import RowCounts, count_rows, find_row_problems
from dsreason.train.common.learning import REPEAT_AFTER, WINDOW, LearningWatch
from dsreason.train.common.run import TRIAL_STEPS, TrainingRun
from tests.runs import make_job, make_run


def find_negative(total: int) -> dict[str, str]:
    return {"negative": f"the sum is {total}"} if total < 0 else {}


def test_warning_needs_full_window(caplog: pytest.LogCaptureFixture) -> None:
    watch = LearningWatch(find_negative)
    for _ in range(WINDOW - 1):
        watch.add(-1)
    assert caplog.messages == []
    assert watch.list_recent() == watch.summarize() == ["the sum is -9"]
    watch.add(-1)
    assert caplog.messages == ["the sum is -10"]


def test_warning_describes_window_and_summary_whole_run(caplog: pytest.LogCaptureFixture) -> None:
    watch = LearningWatch(find_negative)
    for counts in [5] * 20 + [-3] * 9:
        watch.add(counts)
    assert caplog.messages == ["the sum is -6"]  # 5 x 3 - 3 x 7 is the first negative sum of ten
    assert watch.summarize() == []  # 5 x 20 - 3 x 9 is positive


def test_repeated_learning_warning_is_rate_limited(caplog: pytest.LogCaptureFixture) -> None:
    watch = LearningWatch(lambda total: {"a": f"a {total}"} | ({"b": "b"} if watch.num_steps > 50 else {}))
    for _ in range(WINDOW + REPEAT_AFTER):
        watch.add(1)
    assert caplog.messages == ["a 10", "b", "a 10"]


def test_learning_watch_without_steps_reports_nothing() -> None:
    watch = LearningWatch(find_negative)
    assert watch.list_recent() == watch.summarize() == []


# ---------------------------------------------------------------- rows of SFT and DPO


def make_batches(*, num_tokens: int, num_samples: int, skipped: list[str]) -> Any:
    return SimpleNamespace(num_tokens=num_tokens, num_samples=num_samples, skipped=skipped)


def test_rows_of_steps_are_counted() -> None:
    first = count_rows(make_batches(num_tokens=12, num_samples=3, skipped=["row 7"]))
    second = count_rows(make_batches(num_tokens=0, num_samples=0, skipped=["row 8", "row 9"]))
    assert first == RowCounts(steps=1, empty_steps=0, rows=4, skipped=1)
    assert first + second == RowCounts(steps=2, empty_steps=1, rows=6, skipped=3)


@pytest.mark.parametrize(
    ("counts", "texts"),
    [
        (RowCounts(steps=10, empty_steps=0, rows=80, skipped=39), []),
        (RowCounts(steps=10, empty_steps=0, rows=80, skipped=40), ["rows: 40 of 80 rows (10 steps) were skipped;"]),
        (RowCounts(steps=10, empty_steps=1, rows=80, skipped=8), ["rows: 1 of 10 steps had no trained token,"]),
        (RowCounts(steps=1, empty_steps=1, rows=8, skipped=8), ["rows: 1 of 1 step had no trained token,"]),
        (
            RowCounts(steps=10, empty_steps=2, rows=80, skipped=50),
            ["rows: 2 of 10 steps had no trained token,", "rows: 50 of 80 rows (10 steps) were skipped;"],
        ),
    ],
)
def test_skipped_rows_are_reported_with_numbers(counts: RowCounts, texts: list[str]) -> None:
    messages = list(find_row_problems(counts).values())
    assert [message[: len(text)] for message, text in zip(messages, texts, strict=True)] == texts
    assert all("raise model.max_length" in message for message in messages)


# ---------------------------------------------------------------- the run's end


class Finished:
    """A run with or without steps that had a training signal, and the lines that it prints at its end."""

    def __init__(self, folder: Path, learned: list[bool], state: TrainerState | None = None) -> None:
        config = SFTConfig.model_validate({"checkpoint": {"export": "none"}})
        self.run: TrainingRun[SFTConfig] = make_run(make_job(config, folder), state or TrainerState())
        self.run.checkpoints = SimpleNamespace(finish=lambda state: None)  # type: ignore[assignment]
        self.lines: list[str] = []
        self.run.progress.print_line = self.lines.append  # type: ignore[method-assign]
        for value in learned:
            self.run.engine = SimpleNamespace(global_steps=self.run.state.step + 1)  # type: ignore[assignment]
            self.run.count_step(epoch=0.0, learned=value)


def test_run_that_learned_nothing_ends_with_error(tmp_path: Path) -> None:
    finished = Finished(tmp_path, [False] * (TRIAL_STEPS + 1))
    with pytest.raises(NothingLearned) as error:
        finished.run.finish(["rows: all skipped"])
    verdict = "nothing was learned in the 3 steps, so the model is no better than at the start"
    assert str(error.value) == f"{verdict}\n  rows: all skipped"
    assert finished.lines[:2] == [f"warning: {verdict}", "warning: rows: all skipped"]
    assert finished.lines[-1].startswith("finished at step 3")
    failure = build_failure(error.value)
    assert (failure.exit_code, failure.user_fixable, failure.restarts) == (3, True, False)


@pytest.mark.parametrize(
    ("learned", "lines"),
    [
        ([False, True, False], ["warning: rows: some skipped"]),
        ([False, False], ["warning: nothing was learned in the 2 steps, so", "warning: rows: some skipped"]),
    ],
)
def test_run_with_learning_or_trial_succeeds(tmp_path: Path, learned: list[bool], lines: list[str]) -> None:
    finished = Finished(tmp_path, learned)
    finished.run.finish(["rows: some skipped"])
    printed = [line for line in finished.lines if line.startswith("warning: ")]
    assert [text[: len(line)] for text, line in zip(printed, lines, strict=True)] == lines


def test_resumed_run_counts_earlier_steps(tmp_path: Path) -> None:
    idle = Finished(tmp_path, [False] * 3).run.state
    learned = Finished(tmp_path, [True, False, False]).run.state
    with pytest.raises(NothingLearned, match="in the 4 steps"):
        Finished(tmp_path, [False], idle).run.finish()
    for state in (learned, TrainerState(step=3)):  # the latter state is from a version that did not count such steps
        Finished(tmp_path, [False], state).run.finish()
