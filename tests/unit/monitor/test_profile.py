"""Profiles of chosen steps, recorded by torch on the CPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dsreason.errors import ConfigError
from dsreason.monitor.profile import StepProfiler, check_profiled_steps
from dsreason.monitor.profile_table import read_trace
from dsreason.monitor.progress import Progress
from dsreason.phases import record_phase

CPU = torch.device("cpu")
OPERATOR_OF_STEP = {1: torch.sin, 2: torch.cos, 3: torch.tan}


def run_steps(folder: Path, profiled: list[int]) -> None:
    with StepProfiler(profiled, folder, CPU, Progress()) as profiler:
        for step, operator in OPERATOR_OF_STEP.items():
            profiler.begin(step)
            profiler.begin(step)  # further calls change nothing
            with record_phase("forward"):
                operator(torch.ones(3))
        profiler.end()


@pytest.mark.parametrize("profiled", [[], [2], [1, 3]])
def test_only_configured_steps_are_profiled(profiled, tmp_path: Path):
    run_steps(tmp_path / "profile", profiled)
    expected = {f"step_{step}.{ending}" for step in profiled for ending in ("json.gz", "txt")}
    assert {path.name for path in tmp_path.glob("profile/*")} == expected


def test_trace_holds_one_step_with_its_phases(tmp_path: Path):
    run_steps(tmp_path, [2])
    names = [event.name for event in read_trace(tmp_path / "step_2.json.gz")]
    assert [name for name in names if name.startswith("phase")] == ["phase: step 2", "phase: forward"]
    assert "aten::cos" in names
    assert not {"aten::sin", "aten::tan"} & set(names)
    assert "forward" in (tmp_path / "step_2.txt").read_text()


def test_failed_step_is_not_written(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), StepProfiler([1], tmp_path, CPU, Progress()) as profiler:
        profiler.begin(1)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    run_steps(tmp_path, [1])  # a failed profile does not prevent the next one
    assert (tmp_path / "step_1.txt").exists()


def test_unwritable_folder_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "profile").write_text("")
    with caplog.at_level(logging.WARNING):
        run_steps(tmp_path / "profile", [2])
    assert "the profile of step 2 cannot be written" in caplog.text


def test_steps_after_the_last_are_rejected():
    check_profiled_steps([1, 10], total_steps=10)
    with pytest.raises(
        ConfigError, match="step 11 does not exist, because the run ends with step 10; choose steps from 1 to 10"
    ):
        check_profiled_steps([1, 11], total_steps=10)
