"""Runs of the `dsreason` command in separate processes, with their metrics and output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.runner import build_environment

LAST_LINES = 25


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; return an empty list if no step has ended yet."""
    file = output / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@dataclass(frozen=True)
class CommandRun:
    """A run that has ended."""

    seconds: float
    """Seconds from the start, or from the signal if one was sent, until the process ended."""
    output: str
    """Everything that the run printed to the terminal."""
    metrics: list[dict[str, Any]]
    seconds_to_first_step: float

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics if "train/loss" in line]


class Running:
    """A run in a separate process; its output folder is `folder/run`."""

    def __init__(self, command: str, settings: dict[str, Any], folder: Path, *, resume: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(settings))
        self.folder, self.log = folder, folder / "output.log"
        arguments = ["--config", "run.json", "--output-dir", "run", "--nproc", "1"]
        arguments += ["--resume", "auto"] if resume else []
        self.started = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsreason", command, *arguments],
                cwd=folder,
                env=build_environment(),
                stdout=log,
                stderr=log,
            )

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "run")

    def wait_for_steps(self, count: int) -> None:
        """Wait until `count` steps have been run, or the run has ended."""
        while self.process.poll() is None and sum("train/loss" in line for line in self.metrics()) < count:
            time.sleep(0.1)

    def stop(self, number: int) -> None:
        self.process.send_signal(number)
        self.started = time.perf_counter()

    def finish(self, *, expected: int = 0) -> CommandRun:
        """Wait for the run to end; raise RuntimeError with its last lines if the exit code is not the expected one."""
        started = self.started
        self.wait_for_steps(1)
        first_step = time.perf_counter() - started
        code = self.process.wait()
        output = self.log.read_text(errors="replace")
        if code != expected:
            last = "\n".join(output.splitlines()[-LAST_LINES:])
            raise RuntimeError(
                f"dsreason ended with exit code {code}, but {expected} was expected; its last lines:\n{last}"
            )
        return CommandRun(time.perf_counter() - started, output, self.metrics(), first_step)
