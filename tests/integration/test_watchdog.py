"""Real ranks of which one is killed, raises, or keeps the others waiting: the job ends, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsreason.runtime.launch import TIME_LIMIT_EXIT_CODE
from tests.integration.command import dsreason
from tests.integration.rows import write_mixed_rows
from tests.integration.test_grpo import CONFIG

pytestmark = pytest.mark.integration

MINUTE = 60.0
REWARDS = """
import os, signal, time
from pathlib import Path

def on_rank(rank, do):
    if os.environ["RANK"] == rank:
        mark = Path(f"since_{os.getpid()}")  # several workers come here, and one may be killed while it writes
        mark.write_text(str(time.time()))
        mark.replace("since")
        do()
    return 0.0

def kill_rank_1(completion, sample):
    return on_rank("1", lambda: os.kill(os.getppid(), signal.SIGKILL))

def raise_on_rank_1(completion, sample):
    return on_rank("1", lambda: {}["no such key"])

def crash_rank_0(completion, sample):
    return on_rank("0", Path("crash_rank_0/rollouts").touch)  # where the trainer makes a folder after the scores
"""
RANKS = """
import signal, sys, time
from datetime import timedelta
from pathlib import Path
from dsreason.runtime import launch

def wait_for_rank_1(how):
    if how == "collective":
        all_sum(1.0)
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(minutes=10))
    store.get("never set")

def fall_asleep():
    time.sleep(600)

if sys.argv[1] == "launch":
    try:
        launch.start_ranks(lambda attempt: [__file__, sys.argv[2]], ranks=2, log_dir=Path("logs"))
    finally:
        Path("ended").write_text(str(time.time()))
    sys.exit()

launch.enter_rank()
import torch.distributed as dist
from dsreason.runtime.logs import setup_logs
from dsreason.runtime.watchdog import Watchdog
from dsreason.runtime.world import all_sum, barrier, init_world

how = sys.argv[1]
try:
    world = init_world()
    setup_logs(Path.cwd(), world.rank)
    barrier()
    # Of rank 1 too high to be reached: it ends because rank 0 asks for it.
    with Watchdog(world, time_limit=1.0 if world.rank == 0 and how != "raise" else 600.0) as watchdog:
        if world.rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: None)  # never called: no way out of the collective
            with watchdog.phase("train"):
                wait_for_rank_1(how)
        with watchdog.phase("rollout"):
            if how == "raise":
                Path("since").write_text(str(time.time()))
                raise ZeroDivisionError("a bug of rank 1")
            fall_asleep()
except Exception as error:
    sys.exit(launch.report_crash(error))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    folder = tmp_path_factory.mktemp("watchdog")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen3_vl, rows=rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def train(folder: Path, reward: str) -> subprocess.CompletedProcess[str]:
    """`dsreason grpo` with a reward that does something bad in the first step; a minute later everything is gone."""
    options = ["--output-dir", reward, "--nproc", 2, "--set", f'reward.functions={{"rewards.py:{reward}"=1.0}}']
    ended = dsreason("grpo", "--config", "run.toml", *options, cwd=folder)
    assert ended.returncode == 1, ended.stderr
    since = float((folder / "since").read_text())
    assert wait_until_gone(reward, since + MINUTE)
    return ended


def wait_until_gone(word: str, deadline: float) -> bool:
    """Whether no process with the word in its command line is left: ranks and their data workers."""
    while found := [process for process in Path("/proc").glob("[0-9]*") if is_about(process, word)]:
        if time.time() > deadline:
            return False
        time.sleep(0.2)
    return not found


def is_about(process: Path, word: str) -> bool:
    try:
        return f"--output-dir={word}".encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_killed_rank_takes_the_job_along_and_is_named(folder: Path) -> None:
    ended = train(folder, "kill_rank_1")
    assert ended.stderr.splitlines()[-3:] == [
        "error: rank 1 failed; its log: kill_rank_1/logs/rank_1.log",
        "",
        "rank 1 was killed by SIGKILL (often: out of memory; see the kernel log)",
    ]


def test_a_reward_that_raises_on_one_rank_is_told_last(folder: Path) -> None:
    ended = train(folder, "raise_on_rank_1")
    assert 'reward "rewards.py:raise_on_rank_1", sample ' in ended.stderr
    assert ended.stderr.splitlines()[-1] == "KeyError: 'no such key'"
    assert ended.stderr.count("Traceback") == 1


def test_a_rank_that_crashes_between_two_collectives_has_its_traceback_last(folder: Path) -> None:
    ended = train(folder, "crash_rank_0")
    assert "error: rank 0 failed; its log: crash_rank_0/logs/rank_0.log" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("FileExistsError: ")
    assert ended.stderr.count("Traceback") == 1


def run_ranks(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "ranks.py").write_text(RANKS)
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def assert_both_ranks_said_where_they_were(text: str) -> None:
    lines = text.splitlines()
    asleep = next(line for line in lines if line.startswith('rank 1: in phase "rollout" for '))
    waiting = next(line for line in lines if line.startswith('rank 0: in phase "train" for '))
    assert asleep.endswith(" when rank 0 ran out of time")
    assert "out of time; raise monitor.phase_time_limit (1)" in waiting
    assert lines.index("rank 1, thread MainThread (most recent call last):") < lines.index(asleep)
    assert lines.index("rank 0, thread MainThread (most recent call last):") < lines.index(waiting)
    assert "in fall_asleep" in text
    assert "in wait_for_rank_1" in text


def test_a_late_phase_shows_where_all_ranks_are(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, ["ranks.py", "launch", "store"])
    assert done.returncode == TIME_LIMIT_EXIT_CODE
    assert_both_ranks_said_where_they_were(done.stderr)
    assert done.stderr.splitlines()[-1].startswith("rank 0: ")  # the one that was late
    assert_both_ranks_said_where_they_were("".join((tmp_path / f"logs/rank_{rank}.log").read_text() for rank in (0, 1)))


def test_a_late_phase_shows_where_all_ranks_are_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = run_ranks(tmp_path, [*torchrun, "ranks.py", "collective"])
    assert done.returncode == 1  # torchrun's own
    assert f"exitcode  : {TIME_LIMIT_EXIT_CODE}" in done.stderr
    assert_both_ranks_said_where_they_were(done.stderr)


def test_a_rank_that_cannot_be_ended_politely_does_not_hide_the_one_that_raised(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, ["ranks.py", "launch", "raise"])
    assert done.returncode == 1
    assert "error: rank 1 failed; its log: logs/rank_1.log" in done.stderr
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: a bug of rank 1"
    since, ended = (float((tmp_path / name).read_text()) for name in ("since", "ended"))
    assert ended - since < MINUTE
