"""The choice of the failed rank to report. Tests with real ranks: tests/integration/test_launch.py."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsreason.errors import ConfigError, DataError, DsReasonError, Stopped
from dsreason.job.failures import (
    PEER_EXIT_CODE,
    TIME_LIMIT_EXIT_CODE,
    Failure,
    build_failure,
    build_peer_error,
    find_first_failure,
    get_exit_codes,
    read_last_line,
)

TERM, KILL, ABORT = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGABRT


def crash(rank: int, time: float) -> Failure:
    return Failure(rank, f"crash of {rank}", 1, user_fixable=False, time=time)


def told(rank: int, time: float) -> Failure:
    return Failure(rank, f"error of {rank}", 2, user_fixable=True, time=time)


def stopped(rank: int, time: float) -> Failure:
    return Failure(rank, "stopped, and saved", Stopped.exit_code, user_fixable=True, time=time)


def late(rank: int, time: float) -> Failure:
    return Failure(rank, f"stacks of {rank}", TIME_LIMIT_EXIT_CODE, user_fixable=False, time=time)


@pytest.mark.parametrize(
    ("left", "codes", "expected"),
    [
        ([crash(0, 8.0), crash(1, 5.0)], {0: 1, 1: 1}, "crash of 1"),  # the earliest
        ([crash(0, 5.0), crash(1, 5.0)], {0: 1, 1: 1}, "crash of 0"),
        (
            [crash(0, 5.0), told(1, 8.0)],
            {0: 1, 1: 2},
            "error of 1",
        ),  # an error that the user can fix explains the other failures
        (
            [crash(0, 5.0)],
            {0: 1, 1: KILL},
            "rank 1 was killed by SIGKILL (often because memory ran out; see the kernel log)",
        ),
        ([crash(0, 5.0)], {0: 1, 1: TERM}, "crash of 0"),  # the agent ends the other ranks with this signal
        ([told(0, 5.0)], {0: 2, 1: PEER_EXIT_CODE, 2: ABORT}, "error of 0"),
        ([crash(0, 5.0)], {0: 1, 1: 7}, "rank 1 ended with exit code 7 but without a traceback"),
        ([], {0: TERM, 1: TERM}, "rank 0 was killed by SIGTERM"),
        ([stopped(0, 5.0)], {0: 75, 1: -signal.SIGUSR1}, "stopped, and saved"),  # the request reached rank 1 late
        (
            [stopped(0, 5.0)],
            {0: 75, 1: KILL},
            "rank 1 was killed by SIGKILL (often because memory ran out; see the kernel log)",
        ),
    ],
)
def test_causing_failure_is_reported(left: list[Failure], codes: dict[int, int], expected: str) -> None:
    assert find_first_failure(left, codes).text == expected


def test_timeout_reports_all_stacks_with_earliest_last() -> None:
    result = find_first_failure([late(0, 3.0), late(2, 1.0)], {0: 124, 1: KILL, 2: 124})
    assert result.text == "rank 1 did not report what it was doing; its log may show it\n\nstacks of 0\nstacks of 2"
    assert (result.rank, result.exit_code) == (2, TIME_LIMIT_EXIT_CODE)
    assert find_first_failure([late(0, 3.0), told(1, 5.0)], {0: 124, 1: 2}).text == "error of 1"


def test_rank_killed_by_agent_is_not_blamed() -> None:
    failures: Any = {
        0: SimpleNamespace(exitcode=1, timestamp=100),
        1: SimpleNamespace(exitcode=KILL, timestamp=129),
        2: SimpleNamespace(exitcode=KILL, timestamp=130),
    }
    assert get_exit_codes(failures) == {0: 1, 1: KILL, 2: TERM}


@pytest.mark.parametrize(
    ("error", "user_fixable", "restarts"),
    [
        (DsReasonError("a data worker died"), True, True),
        (DataError("row 3"), True, False),
        (ConfigError("optim.lr"), True, False),
        (Stopped("SIGTERM"), True, False),
        (ZeroDivisionError(), False, True),
    ],
)
def test_start_is_retried_unless_user_must_act(error: Exception, user_fixable: bool, restarts: bool) -> None:
    failure = build_failure(error)
    assert (failure.user_fixable, failure.restarts) == (user_fixable, restarts)


def test_ranks_after_crash_get_peer_exit_code() -> None:
    assert build_peer_error(crash(1, 0.0)).exit_code == PEER_EXIT_CODE
    assert build_peer_error(told(1, 0.0)).exit_code == 2


def test_last_line_of_long_log_is_found(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 20_000 + "\nstep 3\n\n  \n")
    assert read_last_line(tmp_path / "log") == "step 3"
    assert read_last_line(tmp_path / "none") == ""


@pytest.mark.parametrize(
    "text",
    ["DataLoader worker (pid 7) is killed by signal: Killed. ", "DataLoader worker (pid(s) 7, 8) exited unexpectedly"],
)
def test_dead_data_worker_error_explains_usual_cause(text: str) -> None:
    failure = build_failure(RuntimeError(text))
    assert failure.text == (
        "a data worker died (often because memory ran out; see the kernel log); lower data.workers or data.prefetch "
        f"({text.strip()})"
    )
    assert failure.user_fixable
    assert failure.restarts
    assert failure.exit_code == 1
