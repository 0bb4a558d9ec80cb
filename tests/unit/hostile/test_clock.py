"""A clock that is put forward or back: what is older and what is newer is not told by it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsreason.cli.job import _checkpoints_in, _resume_at

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
def test_a_restart_goes_on_from_what_the_job_itself_has_saved(here: Path, time: float, step: int) -> None:
    write_checkpoint(here, 2, FUTURE)
    before = _checkpoints_in(here)
    assert _resume_at(1, "other/checkpoints/step_1", here, before) == "other/checkpoints/step_1"
    write_checkpoint(here, step, time)
    assert _resume_at(1, "other/checkpoints/step_1", here, before) == "auto"
    assert _resume_at(0, "other/checkpoints/step_1", here, before) == "other/checkpoints/step_1"


def test_a_restart_of_a_fresh_run_goes_on_from_its_newest(here: Path) -> None:
    assert _resume_at(0, None, here, {}) is None
    assert _resume_at(1, None, here, {}) == "auto"
