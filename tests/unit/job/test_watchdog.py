"""The watchdog of one rank, tested in separate processes because it ends its process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from dsreason.config.schema import Phase as PhaseName
from dsreason.job import watchdog as module
from dsreason.job.failures import TIME_LIMIT_EXIT_CODE, Failure, find_first_failure, get_exit_codes
from dsreason.job.ranks import World
from dsreason.job.watchdog import Watchdog

PROGRAM = """
import contextlib, ctypes, os, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from dsreason.job import launch, logs, watchdog
from dsreason.job.ranks import World

mode, folder = sys.argv[1], Path(sys.argv[2])
watchdog.TICK = 60 if mode == "locked" else 0.1  # the lock is taken before the first look
watchdog.GRACE, watchdog.CLOSING_TIME = 1.0, 1.0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
logs.setup_logs(folder, rank=0)
logs.set_step(7)

def wait_for_a_lock():
    threading.Event().wait(100)

def sleep_with_the_interpreter_lock():
    ctypes.PyDLL(None).sleep(100)

def fail_and_hang():
    stack.callback(wait_for_a_lock)
    stack.enter_context(dog)
    raise RuntimeError("the reason")

dog = watchdog.Watchdog(World(0, 0, 1, torch.device("cpu")), time_limit=600 if mode in ("normal", "fork") else 0.5)
try:
    with contextlib.ExitStack() as stack:
        if mode == "fail":
            fail_and_hang()
        stack.enter_context(dog)
        with dog.track_phase("outer"):
            with dog.track_phase("inner"):
                pass
            time.sleep(0.3)  # a few looks of the watchdog
            if mode == "late":
                threading.Thread(target=wait_for_a_lock, name="helper", daemon=True).start()
                time.sleep(100)
            elif mode == "locked":
                sleep_with_the_interpreter_lock()
            elif mode == "fork" and os.fork() == 0:
                signal.alarm(120)  # ends it where it hangs
                sys.exit(0)
            elif mode == "fork":
                sys.exit(os.wait()[1])
except Exception as error:
    sys.exit(launch.report(error))
"""


def run_program(mode: str, folder: Path) -> tuple[int, str, str]:
    quiet = ["-W", "ignore::DeprecationWarning"]  # Python 3.12 and later warn about forks of multithreaded processes
    command = [sys.executable, *quiet, "-c", PROGRAM, mode, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr, (folder / "logs" / "rank_0.log").read_text()


def test_phase_over_limit_ends_rank_with_stacks(tmp_path: Path) -> None:
    code, stderr, log = run_program("late", tmp_path)
    assert code == TIME_LIMIT_EXIT_CODE
    for text in (stderr, log):
        assert "rank 0, thread helper (most recent call last):" in text
        assert "in wait_for_a_lock" in text
        assert "rank 0, thread MainThread (most recent call last):" in text
        last = text.splitlines()[-1]
        assert last.startswith('rank 0 step 7: in phase "outer" for ')
        assert "the time limit is 0.5 s; raise monitor.phase_time_limit if" in last


def test_rank_holding_interpreter_lock_writes_its_stack(tmp_path: Path) -> None:
    code, _, log = run_program("locked", tmp_path)
    assert code == 1
    assert "in sleep_with_the_interpreter_lock" in log


def test_error_is_reported_when_closing_hangs(tmp_path: Path) -> None:
    code, stderr, log = run_program("fail", tmp_path)
    assert code == 1
    assert stderr.splitlines()[-1] == log.splitlines()[-2].strip() == "RuntimeError: the reason"


@pytest.mark.parametrize("mode", ["normal", "fork"])
def test_run_within_time_limit_is_undisturbed(mode: str, tmp_path: Path) -> None:
    assert run_program(mode, tmp_path) == (0, "", "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def watchdog(clock: SimpleNamespace) -> Watchdog:
    """Build a watchdog with a time limit of one minute; its thread does not run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return Watchdog(World(0, 0, 1, torch.device("cpu")), time_limit=60)
    finally:
        dist.destroy_process_group()


def test_phase_clock_pauses_during_inner_phases(watchdog: Watchdog, clock: SimpleNamespace) -> None:
    with watchdog.track_phase("step"):
        clock.now = 10.0
        with watchdog.track_phase("save"):
            clock.now = 30.0
            with watchdog.track_phase("upload"):
                clock.now = 100.0
            assert [phase.seconds for phase in watchdog._phases] == [100.0, 20.0]
        clock.now = 101.0
        with pytest.raises(KeyError), watchdog.track_phase("log"):
            clock.now = 110.0
            raise KeyError
        assert [(phase.name, phase.seconds) for phase in watchdog._phases] == [("step", 11.0)]
    assert watchdog._phases == []


def test_timer_is_reset_at_every_check(
    watchdog: Watchdog, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_: float) -> bool:
        clock.now += 20.0
        return clock.now > end

    times: list[float] = []
    end = 60.0
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=wait))
    monkeypatch.setattr(watchdog, "_end_in", times.append)
    with watchdog.track_phase("step"):
        watchdog._watch()
    end = 120.0  # after a phase, the time outside phases counts
    watchdog._watch()
    assert times == [limit + module.GRACE for limit in (40.0, 20.0, 0.0, 40.0, 20.0)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "step",
            'in phase "step" for 80 s, but the time limit is 60 s; raise monitor.phase_time_limit if it needs more time',
        ),
        (
            "export",
            'in phase "export" for 120 s, but the time limit is 100 s; raise monitor.phase_time_limits if it needs more time',
        ),
        (
            "",
            'in phase "other" for 80 s, but the time limit is 60 s; raise monitor.phase_time_limit if it needs more time',
        ),
    ],
)
def test_phase_may_have_a_separate_time_limit(
    watchdog: Watchdog, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: PhaseName, said: str
) -> None:
    def wait(_: float) -> bool:
        clock.now += 40.0
        return bool(texts)

    texts: list[str] = []
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=wait))
    monkeypatch.setattr(watchdog, "_end_in", lambda seconds: None)
    monkeypatch.setattr(watchdog, "_end", texts.append)
    watchdog.time_limits = {"export": 100.0}
    with watchdog.track_phase(name) if name else nullcontext():
        watchdog._watch()
    assert texts == [said]


def test_every_trainer_phase_accepts_a_time_limit() -> None:
    folder = Path(module.__file__).parents[1] / "train"
    sources = "".join(file.read_text() for file in folder.rglob("*.py"))
    matches = re.findall(r'(?:watchdog\.track_phase|self\.watch)\("([^"]*)"\)', sources)
    assert {*matches, "other"} == set(get_args(PhaseName))


def late(rank: int, at: float) -> Failure:
    return Failure(rank, f"stack of {rank}\n", TIME_LIMIT_EXIT_CODE, user_fixable=False, time=at)


def test_parent_prints_first_late_rank_last() -> None:
    codes = {0: TIME_LIMIT_EXIT_CODE, 1: TIME_LIMIT_EXIT_CODE, 2: TIME_LIMIT_EXIT_CODE, 3: -signal.SIGKILL}
    failure = find_first_failure([late(0, 3.0), late(1, 1.0), late(2, 2.0)], codes)
    assert failure.rank == 1
    assert failure.exit_code == TIME_LIMIT_EXIT_CODE
    silent = "rank 3 did not report what it was doing; its log may show it\n"
    assert failure.text == "\n".join([silent, "stack of 0\n", "stack of 2\n", "stack of 1\n"])


def test_agent_kill_does_not_count_as_cause() -> None:
    failures = {
        0: SimpleNamespace(exitcode=-signal.SIGKILL, timestamp=130),
        1: SimpleNamespace(exitcode=-signal.SIGKILL, timestamp=100),
    }
    assert find_first_failure([], get_exit_codes(failures)).rank == 1  # type: ignore[arg-type]
