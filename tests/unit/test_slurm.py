"""The script launch/slurm.sbatch, run with stand-ins for Slurm's commands and for torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch/slurm.sbatch"
COMMANDS = {
    "scontrol": 'case $1 in show) echo node-0 ;; requeue) echo "$2" > requeued ;; esac',
    "scancel": 'kill -USR1 "$(cat rank)"; echo >> warnings',
    "srun": 'while [[ $1 != bash ]]; do shift; done; exec "$@"',
    "sleep": "exec /bin/sleep 0.2",  # shortens all waits
    # Like a rank, it handles the signal only once it can save.
    "torchrun": "echo $$ > rank; while [[ ! -f warnings ]]; do /bin/sleep 0.1; done\n[[ $* == *fails* ]] && exit 1\n"
    "exec python3 -c 'import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(75)); time.sleep(30)'",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-0",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    return os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_early_warning_is_repeated_and_job_requeued(environment: dict[str, str], tmp_path: Path) -> None:
    job = subprocess.Popen(["bash", str(SCRIPT), "run.toml", "run"], cwd=tmp_path, env=environment)
    while not (tmp_path / "rank").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 0
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert len((tmp_path / "warnings").read_text()) > 1


def test_failure_without_warning_fails_the_job(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "warnings").touch()
    ended = subprocess.run(["bash", str(SCRIPT), "run.toml", "fails"], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == 1
    assert not (tmp_path / "requeued").exists()
