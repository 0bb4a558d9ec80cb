"""Launching of real ranks: their output, exit codes and restarts, and that no rank outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsreason.job import signals
from dsreason.job.failures import Failure, find_first_failure
from dsreason.job.signals import forward_signals

SCRIPT = Path(__file__).with_name("ranks.py")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
DEEPSPEED = [
    sys.executable,
    "-m",
    "deepspeed.launcher.runner",
    "--num_gpus",
    "2",
    "--master_port",
    "29518",
    "--no_local_rank",
]

pytestmark = pytest.mark.integration


@pytest.fixture
def environment() -> dict[str, str]:
    remaining = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    }
    return remaining | {"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin"}


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(tmp_path: Path, environment: dict[str, str]) -> Launch:
    def run(mode: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "launch", mode, "2", str(restarts), "logs"]
        return subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def test_only_rank_0_writes_to_the_terminal(launch: Launch, tmp_path: Path) -> None:
    done = launch("environment")
    assert done.returncode == 0
    assert done.stderr == "err of rank 0\n"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout.splitlines() == [
        "out of rank 0",
        "native of rank 0",
        f"OMP_NUM_THREADS={threads} DS_ACCELERATOR=cpu TOKENIZERS_PARALLELISM=false WORLD_SIZE=2 LOCAL_RANK=0",
        "python on PATH: True",
        "rank 0 done in attempt 0",
    ]
    log = (tmp_path / "logs" / "rank_1.log").read_text()
    assert all(text in log for text in ("out of rank 1", "err of rank 1", "native of rank 1", "rank 1 done"))


def test_error_on_all_ranks_is_reported_once(launch: Launch) -> None:
    done = launch("user_fixable", restarts=2)  # a mistake of the user is not retried
    assert done.returncode == 2
    assert done.stderr == "error: rows.jsonl, row 3: video is missing; correct the path\n"
    assert done.stdout == ""


def test_error_on_one_rank_stops_the_others(launch: Launch) -> None:
    started = time.monotonic()
    done = launch("user_fixable-on-1")
    assert done.returncode == 2
    assert done.stderr == "error: rows.jsonl, row 4: video is missing; correct the path\n"
    assert time.monotonic() - started < 30  # rank 0 would otherwise sleep for 600 s


def test_failed_rank_traceback_is_printed_last(launch: Launch, tmp_path: Path) -> None:
    done = launch("crash-on-1")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "error: rank 1 failed; its log: logs/rank_1.log"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: a bug of ours"
    assert done.stderr.count("Traceback") == 1
    assert "ZeroDivisionError: a bug of ours" in (tmp_path / "logs" / "rank_1.log").read_text()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            "kill-1",
            "rank 1 was killed by SIGKILL (often because memory ran out; see the kernel log) "
            'in phase "step" after step 3\nits last log line: the last words',
        ),
        ("exit-on-1", "rank 1 ended with exit code 7 but without a traceback"),
    ],
)
def test_rank_death_without_traceback_is_reported(launch: Launch, mode: str, text: str) -> None:
    done = launch(mode)
    assert done.returncode == 1
    assert done.stderr == f"error: rank 1 failed; its log: logs/rank_1.log\n\n{text}\n"


@pytest.mark.parametrize("mode", ["crash-once", "error-once"])
def test_transient_failure_is_restarted_up_to_limit(launch: Launch, mode: str) -> None:
    done = launch(mode, restarts=1)
    assert done.returncode == 0
    assert "only the first time" in done.stderr
    assert "; restart 1 of 1\n" in done.stderr
    assert done.stdout == "rank 0 done in attempt 1\n"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started_ranks(folder: Path) -> list[int]:
    files = [folder / f"pid_{rank}" for rank in range(2)]
    assert wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    assert all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize(("echo_time", "told"), [(60.0, ["USR1"]), (0.0, ["USR1", "TERM"])])
def test_second_interrupt_reaches_ranks_after_delay(
    monkeypatch: pytest.MonkeyPatch, echo_time: float, told: list[str]
) -> None:
    monkeypatch.setattr(signals, "ECHO_TIME", echo_time)
    monkeypatch.setenv(signals.LAUNCHER_PID, str(os.getpid()))
    traps = 'for s in USR1 TERM; do trap "echo $s" $s; done; echo ready; for i in $(seq 20); do sleep 0.1; done'
    with subprocess.Popen(["bash", "-c", traps], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with forward_signals() as received:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
                time.sleep(0.3)
        assert child.stdout.read().split() == told
    assert received == ["SIGTERM", "SIGINT"][: len(told)]


def test_signal_before_first_rank_ends_the_command() -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        pytest.raises(signals.Interrupted, match=r"^SIGTERM$"),
        forward_signals() as received,
    ):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            assert other.poll() is None
            other.kill()
    assert received == ["SIGTERM"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 75), (signal.SIGKILL, -9)])
def test_no_rank_outlives_its_launcher(
    tmp_path: Path, environment: dict[str, str], sent: signal.Signals, code: int
) -> None:
    command = [sys.executable, str(SCRIPT), "launch", "sleep", "2", "0", "logs"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        pids = started_ranks(tmp_path)
        launcher.send_signal(sent)
        _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert stderr == ("" if sent == signal.SIGKILL else f"stopped by {sent.name}\n")
    assert wait_for(lambda: not any(alive(pid) for pid in pids), seconds=10)


def test_torchrun_error_is_reported_by_one_rank(tmp_path: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*TORCHRUN, "--max-restarts=1", str(SCRIPT), "rank", "user_fixable", "0"],
        check=False,
        cwd=tmp_path,
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1  # this is torchrun's own exit code
    text = "rows.jsonl, row 3: video is missing; correct the path"
    assert done.stderr.count(f"error: {text}") == 1
    assert f"traceback : {text}" in done.stderr.rpartition("Root Cause")[2]
    # torchrun may end one rank before it has begun its work, because the other rank has failed.
    assert {file.name.rpartition("_")[2] for file in tmp_path.glob("worked_*")} == {"0"}


@pytest.mark.parametrize("launcher", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_ranks_exit_when_external_launcher_is_killed(
    tmp_path: Path, environment: dict[str, str], launcher: list[str]
) -> None:
    with subprocess.Popen([*launcher, str(SCRIPT), "rank", "sleep", "0"], cwd=tmp_path, env=environment) as process:
        pids = started_ranks(tmp_path)
        process.kill()
    assert wait_for(lambda: not any(alive(pid) for pid in pids))


def failed(rank: int, at: float, user_fixable: bool = False) -> Failure:
    return Failure(rank, f"text of {rank}", exit_code=2 if user_fixable else 1, user_fixable=user_fixable, time=at)


@pytest.mark.parametrize(
    ("left", "exit_codes", "rank"),
    [
        ([failed(0, 2.0), failed(1, 1.0)], {0: 1, 1: 1}, 1),  # the earliest failure is the cause
        # An error that the user can fix takes precedence.
        ([failed(0, 1.0), failed(1, 2.0, user_fixable=True)], {0: 1, 1: 2}, 1),
        ([failed(0, 1.0)], {0: 1, 1: -signal.SIGKILL}, 1),  # rank 0 failed only because it lost its peer
        # Rank 0 lost its peer and wrongly reported a firewall as the cause.
        ([failed(0, 1.0, user_fixable=True)], {0: 2, 1: -signal.SIGKILL}, 1),
        ([failed(0, 1.0)], {0: 1, 1: -signal.SIGTERM}, 0),  # torchrun's agent ended rank 1
        ([failed(0, 1.0)], {1: -signal.SIGTERM}, 0),  # rank 0 was still exiting when the agent looked
        ([failed(0, 1.0)], {0: 1, 1: -signal.SIGABRT}, 0),  # a communication library aborted rank 1
        ([], {0: -signal.SIGTERM, 1: 3}, 1),
        ([], {1: -signal.SIGABRT}, 1),
    ],
)
def test_root_cause_failure_is_found(left: list[Failure], exit_codes: dict[int, int], rank: int) -> None:
    assert find_first_failure(left, exit_codes).rank == rank
