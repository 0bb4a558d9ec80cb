"""Work that is due after a step, and the steps that get a checkpoint, tested with runs without a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dsreason.checkpoints.checkpoint_folder import SavedRun, TrainerState, prune_exports
from dsreason.checkpoints.export_digests import DIGESTS_FILE
from dsreason.checkpoints.export_folder import write_folder_atomically
from dsreason.checkpoints.marker import MARKER, write_json
from dsreason.config.schema import SFTConfig
from dsreason.errors import DataError, DsReasonError, MismatchError, RewardError, SaveError, Stopped
from dsreason.train.common import run, run_folder, saving
from dsreason.train.common.answers import ValidationResult
from dsreason.train.common.run import TrainingRun, is_due
from tests.runs import make_job, make_run
from tests.unit.checkpoints.made_folders import make_export


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., TrainingRun[SFTConfig]]:
    """A function that makes a run with a given state and configuration sections."""
    return lambda state, **sections: make_run(make_job(SFTConfig.model_validate(sections), tmp_path), state)


@pytest.mark.parametrize(
    ("finished", "every", "expected"),
    [([4], 4, True), ([5], 4, False), ([3, 4, 5], 4, True), ([5, 6, 7], 4, False), ([4], 0, False)],
)
def test_due_step_within_rollout_is_detected(finished: list[int], every: int, expected: bool) -> None:
    assert is_due(finished, every) is expected


def test_learning_rate_is_for_next_step(start: Callable[..., TrainingRun[SFTConfig]]) -> None:
    # 3 warmup steps to the peak of 0.5 (fractions 0, 1/2 and 1), then linear decay to 0 over the other 7.
    optim = {"lr": 0.5, "warmup": 3, "schedule": "linear"}
    rates = [start(TrainerState(step=step), optim=optim).learning_rate for step in (0, 1, 2, 3, 4)]
    assert rates == pytest.approx([0.0, 0.25, 0.5, 0.5, 0.5 * 6 / 7])


@pytest.mark.parametrize(
    ("metric", "best", "value", "improved"),
    [
        ("val/loss", 0.5, 0.4, True),
        ("val/loss", 0.5, 0.6, False),
        ("val/accuracy", 0.5, 0.6, True),
        ("val/accuracy", 0.5, 0.4, False),
        ("val/accuracy", 0.5, 0.5, False),
        ("val/loss", None, 9.0, True),
    ],
)
def test_best_step_minimizes_loss_or_maximizes_accuracy(
    start: Callable[..., TrainingRun[SFTConfig]], metric: str, best: float | None, value: float, improved: bool
) -> None:
    metrics = {"val/loss": 1.0, "val/accuracy": 0.0, metric: value}
    state = TrainerState(step=7, best_metric=best, best_name=metric, best_step=None if best is None else 2)
    run = start(state, checkpoint={"best_metric": metric})
    assert run.validate(lambda step: ValidationResult(metrics, [], {})) is improved
    assert (run.state.best_metric, run.state.best_step) == ((value, 7) if improved else (best, 2))


def test_initial_model_is_never_the_best(start: Callable[..., TrainingRun[SFTConfig]]) -> None:
    run = start(TrainerState())
    assert run.validate(lambda step: ValidationResult({"val/loss": 0.1}, [], {})) is False
    assert run.state.best_step is None


def test_best_and_uploading_checkpoints_are_kept(start: Callable[..., TrainingRun[SFTConfig]], tmp_path: Path) -> None:
    saved = SavedRun(TrainerState(best_step=4), world_size=1, zero_stage=3, precision="bf16", parameters={})
    written = tmp_path / "checkpoints" / "step_6"
    written.mkdir(parents=True)
    write_json(written / "trainer_state.json", asdict(saved))
    run = start(TrainerState(step=7, best_step=7), checkpoint={"keep": 3})
    run.job.uploads.waiting = {written.with_name("step_1")}  # type: ignore[attr-defined]
    run.checkpoints.upload_and_prune(written, run.state)
    assert run.checkpoints.writer.pruned == [(3, {"step_1", "step_4", "step_7"})]  # type: ignore[attr-defined]


class Saved:
    """A run of ten steps that records the steps of its checkpoints, exports and uploads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, stop_at: int = 0, **checkpoint: Any) -> None:
        config = SFTConfig.model_validate({"checkpoint": checkpoint, "validation": {"every": 3}})
        self.folder, self.exported = folder, 0
        job = make_job(config, folder, asked=lambda: "SIGTERM" if self.run.state.step == stop_at else "")
        self.run = make_run(job, TrainerState(), write_export=self.export)
        self.uploads: Any = job.uploads
        monkeypatch.setattr(saving, "run_on_rank_zero", lambda call: call())
        self.all_ranks_end = True
        monkeypatch.setattr(run, "wait_for_all_ranks", lambda world, purpose: self.all_ranks_end)
        self.losses = [0.5, 0.3, 0.4, 0.6]  # after the steps 3, 6, 9 and 10

    def validate(self, step: int) -> ValidationResult:
        return ValidationResult({"val/loss": self.losses.pop(0)}, [], {})

    def export(self, output: Path, dtype: str, state: TrainerState) -> None:
        self.exported += 1
        output.mkdir(parents=True)
        (output / "config.json").touch()
        os.utime(output / "config.json", (self.exported, self.exported))

    def train(self) -> Saved:
        with self.run.save_before_error():
            for step in range(1, 11):
                with self.run.track_step():
                    self.train_step(step)
                self.run.finish_steps(step - 1, self.validate)
            self.run.finish()
        return self

    def train_step(self, step: int) -> None:
        self.run.engine.global_steps = step
        self.run.state = replace(self.run.state, step=step)

    @property
    def checkpoints(self) -> list[int]:
        return self.run.checkpoints.writer.steps  # type: ignore[attr-defined, no-any-return]

    @property
    def exports(self) -> set[str]:
        return {path.name for path in self.folder.glob("export/*")}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": 4}, [3, 4, 6, 8, 10]),
        ({"every": 4, "last": False}, [3, 4, 6, 8]),
        ({"every": 5, "last": False, "keep_best": False}, [5, 10]),
        ({"every": 0, "last": False}, [3, 6]),
        ({"every": 0, "last": False, "keep_best": False}, []),
        ({"every": 0, "keep_best": False}, [10]),
    ],
)
def test_periodic_best_and_last_checkpoints_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: list[int]
) -> None:
    saved = Saved(tmp_path, monkeypatch, **settings).train()
    assert saved.checkpoints == expected
    assert saved.exports == {"final"}
    assert saved.uploads.added == ["final", "final"]  # no checkpoint that is not on disk


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"step_2", "step_3", "step_4", "step_6", "step_8", "final"}),
        ({"export_keep": 2}, {"step_6", "step_8", "final"}),
        ({"export_keep": 1}, {"step_6", "step_8", "final"}),  # 6 is the best
        ({"export_keep": 1, "keep_best": False}, {"step_8", "final"}),
    ],
)
def test_newest_best_and_final_exports_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: set[str]
) -> None:
    saved = Saved(tmp_path, monkeypatch, every=2, export="all", **settings).train()
    assert saved.exports == expected


@pytest.mark.parametrize(
    ("step", "best", "settings", "expected"),
    [
        (4, 3, {}, {"step_4"}),
        (3, 3, {}, {"step_3"}),
        (5, 3, {}, set()),  # saved because of a stop request
        (10, 3, {}, set()),  # `finish` writes the final one
        (4, 3, {"export": "final"}, set()),
    ],
)
def test_killed_run_writes_missing_export_on_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    best: int,
    settings: dict[str, Any],
    expected: set[str],
) -> None:
    saved = Saved(tmp_path, monkeypatch, **{"every": 2, "export": "all", **settings})
    saved.run.state = replace(saved.run.state, step=step, best_step=best)
    marker = saved.run.checkpoints.folder / f"step_{step}" / MARKER
    marker.parent.mkdir(parents=True)
    marker.touch()
    for _ in range(2):  # existing exports are not written again
        saved.run.begin_steps(saved.validate)
    assert saved.exports == expected
    assert saved.exported == len(expected)


def test_foreign_checkpoint_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path, monkeypatch, every=2, export="all")
    saved.run.state = replace(saved.run.state, step=4)
    saved.run.begin_steps(saved.validate)
    assert saved.exports == set()


def test_earlier_exports_stay_when_exporting_only_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        (tmp_path / "export" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "export" / f"step_{step}" / "config.json").touch()
    saved = Saved(tmp_path, monkeypatch, every=2, export="final", export_keep=1, keep_best=False).train()
    assert saved.exports == {"step_2", "step_4", "final"}


def test_export_waiting_for_upload_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path, monkeypatch, every=2, export="all", export_keep=1, keep_best=False)
    saved.uploads.waiting = {tmp_path / "export" / "step_2"}
    assert saved.train().exports == {"step_2", "step_8", "final"}


@pytest.mark.parametrize("clock", [1, -1], ids=["the clock goes on", "the clock is set back"])
def test_pruning_keeps_exports_before_current_step(tmp_path: Path, clock: int) -> None:
    for written, step in enumerate((200, 300, 150, 160)):  # resumed from step 100
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "config.json").touch()
        os.utime(tmp_path / f"step_{step}" / "config.json", (clock * written, clock * written))
    prune_exports(tmp_path, 2, step=160)
    assert {path.name for path in tmp_path.iterdir()} == {"step_150", "step_160"}


@pytest.mark.parametrize(("last", "saved", "text"), [(True, [4], "saved"), (False, [], "not saved")])
def test_stop_saves_only_with_checkpoints_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool, saved: list[int], text: str
) -> None:
    run = Saved(tmp_path, monkeypatch, stop_at=4, every=0, keep_best=False, last=last)
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after step 4, which is {text}"):
        run.train()
    assert run.checkpoints == saved


@pytest.mark.parametrize("error", [RewardError("the server is gone"), DataError("the image is gone")])
def test_last_step_is_saved_before_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DsReasonError) -> None:
    saved = Saved(tmp_path, monkeypatch, every=0, keep_best=False)
    monkeypatch.setattr(saved, "validate", raise_in_validation(error))
    with pytest.raises(type(error)) as caught:
        saved.train()
    assert (
        str(caught.value)
        == f"{error.args[0].splitlines()[0]}\nThe last finished step, 3, is saved; continue with --resume auto"
    )
    assert saved.checkpoints == [3]

    (state,) = saved.run.checkpoints.writer.states  # type: ignore[attr-defined]
    resumed = Saved(tmp_path, monkeypatch, every=0)
    resumed.run.state = state
    resumed.run.begin_steps(resumed.validate)
    assert resumed.losses == [0.3, 0.4, 0.6]  # the interrupted validation is repeated, but only once
    resumed.run.begin_steps(resumed.validate)
    assert resumed.losses == [0.3, 0.4, 0.6]


def raise_in_validation(error: DsReasonError) -> Callable[[int], ValidationResult]:
    def validate(step: int) -> ValidationResult:
        raise error

    return validate


def test_stop_during_wait_is_reported_with_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path, monkeypatch, every=0, keep_best=False)
    monkeypatch.setattr(saved, "validate", raise_in_validation(Stopped("stopped by SIGTERM")))
    with pytest.raises(Stopped, match="^stopped by SIGTERM after step 3, which is saved; continue with --resume auto$"):
        saved.train()
    assert saved.checkpoints == [3]


def test_stop_before_first_step_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path, monkeypatch, every=0)
    with (
        pytest.raises(Stopped, match="before the first step was finished; nothing is saved"),
        saved.run.save_before_error(),
    ):
        raise Stopped("stopped by SIGTERM")
    assert saved.checkpoints == []


@pytest.mark.parametrize(("updated", "checkpoints"), [(False, [4]), (True, [])])
def test_mismatch_saves_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updated: bool, checkpoints: list[int]
) -> None:
    saved = Saved(tmp_path, monkeypatch, every=0, keep_best=False)
    with pytest.raises(MismatchError) as caught, saved.run.save_before_error():
        saved.train_step(4)
        with saved.run.track_step():
            saved.run.engine.global_steps += updated
            raise MismatchError("step 5: differs")
    outcome = "" if updated else "\nThe last finished step, 4, is saved; continue with --resume auto"
    assert str(caught.value) == f"step 5: differs{outcome}"
    assert saved.checkpoints == checkpoints


@pytest.mark.parametrize("case", ["in a step", "between backward and count", "other ranks go on", "full disk"])
def test_unsound_state_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    saved = Saved(tmp_path, monkeypatch, every=0, keep_best=False)
    error = SaveError("no space left") if case == "full disk" else DataError("broken")
    saved.all_ranks_end = case != "other ranks go on"
    with pytest.raises(type(error), match=f"^{error}$"), saved.run.save_before_error():
        saved.train_step(4)
        if case == "between backward and count":
            saved.run.engine.global_steps = 5
        with saved.run.track_step() if case == "in a step" else nullcontext():
            raise error
    assert saved.checkpoints == []


def test_failed_save_is_added_to_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(tmp_path, monkeypatch, every=0, keep_best=False)

    def fail(step: int, state: TrainerState) -> None:
        raise SaveError("no space left")

    monkeypatch.setattr(saved.run.checkpoints.writer, "start", fail)
    message = "^broken\nThe last finished step, 4, could not be saved: no space left$"
    with pytest.raises(DataError, match=message), saved.run.save_before_error():
        saved.train_step(4)
        raise DataError("broken")


@pytest.mark.parametrize(
    ("folder", "metric", "best"),
    [("here", "val/loss", (0.4, 2)), ("here", "val/accuracy", (None, None)), ("elsewhere", "val/loss", (None, None))],
)
def test_resumed_best_needs_same_metric_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, metric: str, best: tuple[float | None, int | None]
) -> None:
    saved = TrainerState(step=3, best_metric=0.4, best_name="val/loss", best_step=2)
    monkeypatch.setattr(run_folder, "load_checkpoint", lambda *_, **__: saved)
    monkeypatch.setattr(run_folder, "run_once_per_folder", lambda world, call: call())
    config = SFTConfig.model_validate({"output_dir": str(tmp_path / "here"), "checkpoint": {"best_metric": metric}})
    checkpoint = tmp_path / folder / "checkpoints/step_3"
    checkpoint.mkdir(parents=True)
    state = run_folder.start_state(None, checkpoint, config, tmp_path, None)  # type: ignore[arg-type]
    assert (state.step, state.best_metric, state.best_step) == (3, *best)


def test_outdated_export_is_written_again(tmp_path: Path) -> None:
    export, checkpoint = tmp_path / "export/final/config.json", tmp_path / "step_7"
    assert saving.is_outdated(export, checkpoint)
    export.parent.mkdir(parents=True)
    export.touch()
    assert not saving.is_outdated(export, checkpoint)
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").touch()
    os.utime(export, (100, 100))
    os.utime(checkpoint / "COMPLETE", (200, 200))
    assert saving.is_outdated(export, checkpoint)
    os.utime(checkpoint / "COMPLETE", (50, 50))
    assert not saving.is_outdated(export, checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", DIGESTS_FILE])
@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b""), Path.unlink], ids=["empty", "removed"])
def test_damaged_export_of_finished_run_is_written_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path], object],
) -> None:
    with write_folder_atomically(tmp_path / "export" / "final") as draft:
        draft.rmdir()
        make_export(draft)
    sound = Saved(tmp_path, monkeypatch)
    sound.run.finish()
    assert sound.exported == 0
    damage(tmp_path / "export" / "final" / name)
    resumed = Saved(tmp_path, monkeypatch)
    resumed.run.finish()
    is_unknown = name == DIGESTS_FILE and damage is Path.unlink  # looks like an export of an older version
    assert resumed.exported == (0 if is_unknown else 1)


def test_repeated_skips_are_counted_but_logged_once(
    start: Callable[..., TrainingRun[SFTConfig]], caplog: pytest.LogCaptureFixture
) -> None:
    run = start(TrainerState())
    run.count_skipped(["row 3: no file", "row 5: no file"])
    run.count_skipped(["row 3: no file"])
    assert run.skipped.total() == 3
    assert [record.getMessage() for record in caplog.records] == [
        "skipped: row 3: no file",
        "skipped: row 5: no file",
    ]
