"""Profiles of individual steps: a trace for Perfetto, and tables of the time by phase and operator."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dsreason.errors import ConfigError
from dsreason.files.atomic import write_file
from dsreason.files.step_names import format_step
from dsreason.monitor.memory import wait_for_device
from dsreason.monitor.profile_table import read_trace, render_report
from dsreason.monitor.progress import Progress
from dsreason.phases import record_phase

log = logging.getLogger(__name__)

FOLDER = "profile"


class StepProfiler(AbstractContextManager["StepProfiler"]):
    """A profiler for selected steps on this rank, which writes `step_N.json.gz` and `step_N.txt` to a folder.

    Neither stacks nor shapes are recorded, and a step's events are dropped once they have been written. Memory use and file size
    therefore depend only on the number of operators in one step.
    """

    def __init__(self, steps: Collection[int], folder: Path, device: torch.device, progress: Progress) -> None:
        self.steps, self.folder, self.device, self.progress = steps, folder, device, progress
        self.step: int | None = None
        """Step being profiled; None while no profile is being recorded."""
        self._profile: profile | None = None
        self._recording = ExitStack()

    def begin(self, step: int) -> None:
        """End the profile of any other step, and start a profile of `step` if it is selected."""
        if step == self.step:
            return
        self.end()
        if step not in self.steps:
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        wait_for_device(self.device)  # exclude kernels of the previous step
        self.step = step
        self._profile = self._recording.enter_context(profile(activities=activities))
        self._recording.enter_context(record_phase(f"step {step}"))

    def end(self) -> None:
        """Stop profiling the current step, if any, and write its profile."""
        if self._profile is None or self.step is None:
            return
        wait_for_device(self.device)
        recorded, step = self._profile, self.step
        self._drop()
        with self.progress.track_phase(f"writing the profile of step {step}"):
            try:
                self._write(recorded, step)
            except OSError as error:
                log.warning("%s: the profile of step %d cannot be written: %s", self.folder, step, error)

    def _write(self, recorded: profile, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace, table = self.folder / f"{format_step(step)}.json.gz", self.folder / f"{format_step(step)}.txt"
        recorded.export_chrome_trace(str(trace))
        report = render_report(read_trace(trace))
        write_file(table, report + "\n")
        size = trace.stat().st_size / 2**20
        summary = report.partition("\n")[0]
        log.info(
            "profile of %s; tables: %s; trace for https://ui.perfetto.dev: %s (%.1f MiB)", summary, table, trace, size
        )

    def _drop(self) -> None:
        self._recording.close()
        self._profile = self.step = None

    def __exit__(self, *exc: object) -> None:
        """Discard the profile of an unfinished step."""
        self._drop()


def check_profiled_steps(steps: Sequence[int], total_steps: int) -> None:
    """Raise ConfigError if the run ends before it reaches one of the steps to profile."""
    if late := [step for step in steps if step > total_steps]:
        raise ConfigError(
            f"monitor.profile: step {late[0]} does not exist, because the run ends with step {total_steps}; choose steps from 1 "
            f"to {total_steps}"
        )
