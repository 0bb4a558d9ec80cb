"""The start of ranks, tested without ranks. Tests with real ranks: tests/integration/test_launch.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsreason.errors import Stopped
from dsreason.job import launch
from dsreason.job.failures import Failure, RankError

FAILURE = Failure(1, "crash", 7, user_fixable=False, time=0.0)


def test_environment_variables_are_restored_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSREASON_A", "before")
    monkeypatch.delenv("DSREASON_B", raising=False)
    with pytest.raises(ZeroDivisionError), launch.set_variables({"DSREASON_A": "1", "DSREASON_B": "2"}):
        assert (os.environ["DSREASON_A"], os.environ["DSREASON_B"]) == ("1", "2")
        raise ZeroDivisionError
    assert os.environ["DSREASON_A"] == "before"
    assert "DSREASON_B" not in os.environ


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch._build_rank_environment(ranks, Path("logs"), "errors")["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch._build_rank_environment(ranks, Path("logs"), "errors")["OMP_NUM_THREADS"] == "5"


def started(monkeypatch: pytest.MonkeyPatch, failures: Sequence[Failure | None], max_restarts: int) -> list[int]:
    """Launch a job whose attempts end with `failures` in turn, and return the attempts."""
    following, attempts = iter(failures), []
    monkeypatch.setattr(launch, "_run_once", lambda *_: next(following))

    def arguments(attempt: int) -> list[str]:
        attempts.append(attempt)
        return []

    try:
        launch.start_ranks(arguments, ranks=2, log_dir=Path("logs"), max_restarts=max_restarts)
    except (SystemExit, RankError) as error:
        attempts.append(error.code if isinstance(error, SystemExit) else error.exit_code)
    return attempts


def test_failure_is_restarted_up_to_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, [FAILURE, FAILURE, None], 2) == [0, 1, 2]
    assert started(monkeypatch, [FAILURE, FAILURE, FAILURE], 2) == [0, 1, 2, 7]
    assert started(monkeypatch, [FAILURE], 0) == [0, 7]


def test_user_fixable_failure_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, [replace(FAILURE, user_fixable=True, restarts=False)], 5) == [0, 7]


@pytest.mark.parametrize(
    ("exit_code", "signal_number", "received", "expected"),
    [
        (Stopped.exit_code, 0, ["SIGINT"], ("stopped by SIGINT, saved", Stopped.exit_code)),
        (1, 10, ["SIGTERM"], ("stopped by SIGTERM", Stopped.exit_code)),
        (
            1,
            15,
            ["SIGTERM", "SIGTERM"],
            ("ended immediately by a second SIGTERM; everything saved before is kept", 143),
        ),
        (1, 15, ["SIGTERM"], ("stopped by SIGUSR1, saved", 1)),
        (7, 0, ["SIGTERM"], ("stopped by SIGUSR1, saved", 7)),
    ],
)
def test_stop_signal_determines_message_and_exit_code(
    exit_code: int, signal_number: int, received: list[str], expected: tuple[str, int]
) -> None:
    failure = replace(FAILURE, text="stopped by SIGUSR1, saved", exit_code=exit_code, signal=signal_number)
    stopped = launch._convert_stopped_failure(failure, received)
    assert (stopped.text, stopped.exit_code) == expected
