"""Clocks that were set forward or back, which must not decide which files are older or newer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsreason.checkpoints.model_card import build_model_card
from dsreason.cli.job import _choose_resume, _list_checkpoints
from dsreason.evaluation.ask.models import find_run_weights
from dsreason.train.common.saving import is_outdated

PAST, FUTURE = 1.0, 4e9


def write_checkpoint(run: Path, step: int, time: float) -> None:
    folder = run / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "new").write_text("{}")
    (folder / "new").replace(folder / "COMPLETE")
    for path in (folder / "COMPLETE", folder):
        os.utime(path, (time, time))


@pytest.mark.parametrize("time", [PAST, FUTURE])
@pytest.mark.parametrize("step", [2, 4])
def test_restart_resumes_from_checkpoint_of_same_job(here: Path, time: float, step: int) -> None:
    write_checkpoint(here, 2, FUTURE)
    before = _list_checkpoints(here)
    assert _choose_resume(1, "other/checkpoints/step_1", here, before) == "other/checkpoints/step_1"
    write_checkpoint(here, step, time)
    assert _choose_resume(1, "other/checkpoints/step_1", here, before) == "auto"
    assert _choose_resume(0, "other/checkpoints/step_1", here, before) == "other/checkpoints/step_1"


def test_fresh_run_restart_resumes_from_newest(here: Path) -> None:
    assert _choose_resume(0, None, here, {}) is None
    assert _choose_resume(1, None, here, {}) == "auto"


def write_export(run: Path, step: int, time: float) -> Path:
    """Write a run's final export, which contains no other information on its age."""
    final = run / "export" / "final"
    final.mkdir(parents=True)
    (final / "README.md").write_text(build_model_card(run, step, dtype="bf16"))
    (final / "config.json").write_text("{}")
    os.utime(final / "config.json", (time, time))
    return final


@pytest.mark.parametrize("time", [PAST, FUTURE])
def test_continued_run_is_exported_again(here: Path, time: float) -> None:
    final = write_export(here, 2, time)
    write_checkpoint(here, 4, 1e9)
    assert is_outdated(final / "config.json", here / "checkpoints" / "step_4")


@pytest.mark.parametrize("time", [PAST, FUTURE])
def test_evaluation_uses_the_last_step(here: Path, time: float) -> None:
    final = write_export(here, 4, time)
    write_checkpoint(here, 4, 1e9)
    assert find_run_weights(str(here)) == final  # the checkpoint is the same
    write_checkpoint(here, 6, 1e9)
    assert find_run_weights(str(here)) == here / "checkpoints" / "step_6"


def test_timestamp_decides_between_old_export_and_run(here: Path) -> None:
    final = write_export(here, 4, 100)
    write_checkpoint(here, 2, 200)
    assert find_run_weights(str(here)) == here / "checkpoints" / "step_2"
    write_checkpoint(here, 2, 50)
    assert find_run_weights(str(here)) == final
