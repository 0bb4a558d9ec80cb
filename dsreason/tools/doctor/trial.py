"""Trial runs: a collective with two ranks, and one GRPO step that trains a tiny model with its rollout engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping

from dsreason.job.leftovers import make_temporary_folder
from dsreason.tools.doctor.finding import DoctorFinding, find_last_line, report_failure, report_pass, run_program

COLLECTIVE_SECONDS, ENGINE_SECONDS = 180, 600
COLLECTIVE = [sys.executable, "-P", "-m", "dsreason.tools.doctor.collective"]
TINY = {
    "train.max_steps": "1",
    "data.validation": "0",
    "validation.before_training": "false",
    "grpo.prompts_per_step": "2",
    "grpo.num_generations": "2",
    "rollout.max_completion_length": "8",
    "checkpoint.every": "0",
    "checkpoint.last": "false",
    "checkpoint.keep_best": "false",
    "checkpoint.export": "none",
    "rollout.show_every": "0",
}
"""Settings for one step with the built-in task and model. In this step, the engine starts, sleeps, wakes and receives weights,
and its completions are checked."""


def check_collective() -> Iterator[DoctorFinding]:
    started = time.monotonic()
    code, text = run_program(COLLECTIVE, COLLECTIVE_SECONDS)
    seconds = time.monotonic() - started
    lines = [line for line in text.splitlines() if line.startswith("collective: ")]
    if code == 0 and lines:
        yield report_pass("2 ranks", f"{lines[-1].removeprefix('collective: ')} ({seconds:.0f} s including startup)")
    elif code == 124:
        cure = (
            "set NCCL_DEBUG=INFO to see where the ranks wait; a firewall may block connections of this host to itself"
        )
        yield report_failure("2 ranks", f"did not connect within {COLLECTIVE_SECONDS} s", cure)
    else:
        yield report_failure("2 ranks", find_last_line(text), "follow the message; set NCCL_DEBUG=INFO to see more")


def check_engine() -> Iterator[DoctorFinding]:
    started = time.monotonic()
    with make_temporary_folder() as folder:
        options = [f"--set={key}={value}" for key, value in TINY.items()]
        command = [
            sys.executable,
            "-P",
            "-m",
            "dsreason",
            "grpo",
            "--nproc",
            "1",
            "--output-dir",
            f"{folder}/run",
            *options,
        ]
        code, text = run_program(command, ENGINE_SECONDS)
    seconds = time.monotonic() - started
    if code == 0:
        yield report_pass("engine", f"vLLM sampled, slept and woke, and a tiny model was trained ({seconds:.0f} s)")
    elif code == 124:
        yield report_failure(
            "engine",
            f"did not finish within {ENGINE_SECONDS} s",
            "run `dsreason grpo --nproc 1` to see where the engine waits",
        )
    else:
        yield report_failure(
            "engine", find_last_line(text), "follow the message; run `dsreason grpo --nproc 1` to see the full output"
        )


def is_outside_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process runs outside any launcher; inside one, the trial runs would join the launcher's job."""
    return not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & environment.keys()
