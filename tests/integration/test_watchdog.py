"""Jobs in which one rank is killed, raises an error, or keeps the others waiting: the job ends and reports the reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsreason.job.failures import TIME_LIMIT_EXIT_CODE
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.test_grpo import CONFIG

pytestmark = [pytest.mark.integration, pytest.mark.long]

MINUTE = 60.0
REWARDS = """
import os, signal, time
from pathlib import Path

def on_rank(rank, do):
    if (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (rank, "2"):  # false when the reward is tried before training
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
import logging, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from dsreason.job import launch

def wait_for_rank_1(how):
    if how == "collective":
        reduce_sum(1.0)
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(minutes=10))
    store.get("never set")

def fall_asleep():
    time.sleep(600)

def end(how):
    if how in (f"kill-{world.rank}", f"raise-{world.rank}"):
        time.sleep(1)  # a thread of rank 0 tells the others where rank 0 is
        Path("since").write_text(str(time.time()))
        if how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError(f"a bug of rank {world.rank}")

if sys.argv[1] == "launch":
    try:
        launch.start_ranks(lambda attempt: [__file__, sys.argv[2]], ranks=2, log_dir=Path("logs"))
    finally:
        Path("ended").write_text(str(time.time()))
    sys.exit()

launch.enter_rank()
import torch.distributed as dist
from dsreason.errors import DsReasonError
from dsreason.job import watchdog as module
from dsreason.job.logs import set_step, setup_logs
from dsreason.job.watchdog import Watchdog
from dsreason.job.ranks import reduce_sum, wait_for_ranks, init_world

how = sys.argv[1]
module.CLOSING_TIME = 3.0
try:
    world = init_world()
    setup_logs(Path.cwd(), world.rank)
    set_step(7)
    logging.getLogger("dsreason").info("the last words of rank %d", world.rank)
    signal.signal(signal.SIGTERM, lambda *_: None)  # never called where rank 0 is: no way out of the collective
    wait_for_ranks()
    # Of rank 1 too high to be reached: it ends because rank 0 asks for it.
    late = world.rank == 0 and how in ("store", "collective")
    with Watchdog(world, time_limit=1.0 if late else 600.0) as watchdog:
        if world.rank == 0:
            with watchdog.track_phase("train"):
                end(how)
                wait_for_rank_1(how)
        with watchdog.track_phase("rollout"):
            end(how)
            fall_asleep()
except Exception as error:
    sys.exit(launch.report(error))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    folder = tmp_path_factory.mktemp("watchdog")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen3_vl, rows=rows))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def train(folder: Path, reward: str) -> subprocess.CompletedProcess[str]:
    """Run `dsreason grpo` with a reward that fails in the first step; all processes must be gone a minute later."""
    options = ["--output-dir", reward, "--nproc", 2, "--set", f'reward.functions={{"rewards.py:{reward}"=1.0}}']
    ended = dsreason("grpo", "--config", "run.toml", *options, cwd=folder)
    assert ended.returncode == 1, ended.stderr
    since = float((folder / "since").read_text())
    assert wait_until_gone(reward, since + MINUTE)
    return ended


def wait_until_gone(word: str, deadline: float) -> bool:
    """Return whether all processes whose command line contains the word (ranks and data workers) end in time."""
    while paths := [process for process in Path("/proc").glob("[0-9]*") if is_about(process, word)]:
        if time.time() > deadline:
            return False
        time.sleep(0.2)
    return not paths


def is_about(process: Path, word: str) -> bool:
    try:
        return f"--output-dir={word}".encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_killed_rank_ends_job_and_is_reported(folder: Path) -> None:
    ended = train(folder, "kill_rank_1")
    *_, log, empty, killed, last = ended.stderr.splitlines()
    assert (log, empty) == ("error: rank 1 failed; its log: kill_rank_1/logs/rank_1.log", "")
    assert killed == 'rank 1 was killed by SIGKILL (often because memory ran out; see the kernel log) in phase "reward"'
    assert last.startswith("its last log line: 20")


@pytest.mark.long
def test_reward_error_is_reported_last(folder: Path) -> None:
    ended = train(folder, "raise_on_rank_1")
    assert 'reward "rewards.py:raise_on_rank_1", sample ' in ended.stderr
    assert ended.stderr.splitlines()[-1] == "  KeyError: 'no such key'"
    assert ended.stderr.count("Traceback") == 1


@pytest.mark.long
def test_crashed_rank_traceback_is_printed_last(folder: Path) -> None:
    ended = train(folder, "crash_rank_0")
    assert "error: rank 0 failed; its log: crash_rank_0/logs/rank_0.log" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("FileExistsError: ")
    assert ended.stderr.count("Traceback") == 1


def run_ranks(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "ranks.py").write_text(RANKS)
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
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
    asleep = next(line for line in lines if line.startswith('rank 1 step 7: in phase "rollout" for '))
    waiting = next(line for line in lines if line.startswith('rank 0 step 7: in phase "train" for '))
    assert asleep.endswith(" when rank 0 exceeded its time limit")
    assert "but the time limit is 1 s; raise monitor.phase_time_limit if" in waiting
    assert lines.index("rank 1, thread MainThread (most recent call last):") < lines.index(asleep)
    assert lines.index("rank 0, thread MainThread (most recent call last):") < lines.index(waiting)
    assert "in fall_asleep" in text
    assert "in wait_for_rank_1" in text


def test_phase_timeout_logs_stacks_of_all_ranks(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, ["ranks.py", "launch", "store"])
    assert done.returncode == TIME_LIMIT_EXIT_CODE
    assert_both_ranks_said_where_they_were(done.stderr)
    assert done.stderr.splitlines()[-1].startswith("rank 0 step 7: ")  # this rank was late
    assert_both_ranks_said_where_they_were("".join((tmp_path / f"logs/rank_{rank}.log").read_text() for rank in (0, 1)))


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", "29517", "--no_local_rank"]


@pytest.mark.nightly
def test_phase_timeout_logs_all_stacks_under_torchrun(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, [*TORCHRUN, "ranks.py", "collective"])
    assert done.returncode == 1  # this is torchrun's own exit code
    assert f"exitcode  : {TIME_LIMIT_EXIT_CODE}" in done.stderr
    assert_both_ranks_said_where_they_were(done.stderr)


@pytest.mark.parametrize(
    ("launcher", "how", "place"),
    [
        pytest.param(TORCHRUN, "kill-1", 'in phase "rollout"', marks=pytest.mark.nightly),
        (TORCHRUN, "kill-0", 'in phase "train"'),
        pytest.param(DEEPSPEED, "kill-1", 'in phase "rollout"', marks=pytest.mark.nightly),
    ],
    ids=["torchrun-1", "torchrun-0", "deepspeed-1"],
)
def test_surviving_rank_reports_killed_rank(launcher: list[str], how: str, place: str, tmp_path: Path) -> None:
    done = run_ranks(tmp_path, [*launcher, "ranks.py", how])
    assert done.returncode != 0
    rank = how[-1]
    text = f"rank {rank} on {socket.gethostname()} died {place} after step 7 (it was killed, or its host is down); "
    text += "its last log line: "
    stderr = done.stderr[done.stderr.index(f"error: {text}") :]
    assert f"INFO dsreason: the last words of rank {rank}; its log: {tmp_path}/logs/rank_{rank}.log\n" in stderr
    if launcher is TORCHRUN:
        assert text in done.stderr.rpartition("Root Cause")[2]
    assert gone_within_a_minute(tmp_path)


@pytest.mark.parametrize(
    "launcher", [TORCHRUN, pytest.param(DEEPSPEED, marks=pytest.mark.nightly)], ids=["torchrun", "deepspeed"]
)
def test_first_failing_rank_traceback_is_printed_last(launcher: list[str], tmp_path: Path) -> None:
    done = run_ranks(tmp_path, [*launcher, "ranks.py", "raise-1"])
    assert done.returncode != 0
    last = done.stderr.rpartition("Traceback (most recent call last):")[2]
    assert "ZeroDivisionError: a bug of rank 1" in last
    before_the_report = done.stderr.partition("ranks.py FAILED")[0]  # torchrun prints this report last
    # Both ranks know the error, but only one reports it.
    assert before_the_report.count("ZeroDivisionError: a bug of rank 1") == 1
    assert gone_within_a_minute(tmp_path)


def gone_within_a_minute(folder: Path) -> bool:
    return time.time() - float((folder / "since").read_text()) < MINUTE


def test_unresponsive_rank_does_not_hide_error(tmp_path: Path) -> None:
    done = run_ranks(tmp_path, ["ranks.py", "launch", "raise-1"])
    assert done.returncode == 1
    assert "error: rank 1 failed; its log: logs/rank_1.log" in done.stderr
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: a bug of rank 1"
    since, ended = (float((tmp_path / name).read_text()) for name in ("since", "ended"))
    assert ended - since < MINUTE


KILLING_ADAPTER = """
import json, os, signal
from pathlib import Path
from dsreason.data.types import Sample

MARK = Path("killed_once")

def to_sample(row, data):
    second = next(Path("outputs").glob("*/checkpoints/step_2/COMPLETE"), None)
    if os.environ.get("RANK") == "1" and second and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    return Sample(id=row["id"], messages=messages, answer=row["answer"])
"""
KILLED_CONFIG = """
model.path = "{model}"
data.adapter = "adapter.py"
data.path = "{rows}"
data.workers = 0
optim.lr = 1e-3
train.epochs = 3
train.global_batch_size = 4
train.micro_batch_size = 2
train.precision = "fp32"
checkpoint.every = 1
checkpoint.export = "none"
"""


@pytest.mark.long
def test_torchrun_restarts_killed_run_from_newest_checkpoint(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    rows = write_mixed_rows(tmp_path / "data")
    (tmp_path / "adapter.py").write_text(KILLING_ADAPTER)
    (tmp_path / "run.toml").write_text(KILLED_CONFIG.format(model=tiny_qwen2_5_vl, rows=rows))
    command = [sys.executable, *TORCHRUN, "--max-restarts=1", "-m", "dsreason", "sft", "--config", "run.toml"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs").iterdir()  # no --output-dir: the restart has found the folder
    assert (tmp_path / "killed_once").exists()
    assert "error: rank 1 on" in done.stderr
    assert "resumed from" in (run / "logs/rank_0.log").read_text()
    completed = dsreason("sft", "--config", "run.toml", "--output-dir", "whole", "--nproc", 2, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    losses = [[line["train/loss"] for line in metrics(r) if "train/loss" in line] for r in (run, tmp_path / "whole")]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
