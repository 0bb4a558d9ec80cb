"""Lifelines of three ranks in one process, and the failures that they report to each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue

import pytest
import torch.distributed as dist

from dsreason.job import lifeline as module
from dsreason.job.failures import PEER_EXIT_CODE, Failure
from dsreason.job.lifeline import Lifeline, Peer

HOST = socket.gethostname()
PATIENCE = 120.0
"""Maximum waiting time in seconds, enough for a machine under load."""


class Ranks:
    """Three connected ranks: `lines[i]` is the lifeline of rank i, `heard[i]` holds the failures reported to it."""

    def __init__(self, folder: Path) -> None:
        store = dist.HashStore()
        self.heard: list[Queue[Failure]] = [Queue() for _ in range(3)]
        self.logs = [folder / f"rank_{rank}.log" for rank in range(3)]
        self.lines = [Lifeline(rank, 3, store) for rank in range(3)]
        for line, log, heard in zip(self.lines, self.logs, self.heard, strict=True):
            line.open(heard.put)
            line.report_log(str(log))
        # Rank 0 sends its log's path only to ranks that have already connected.
        wait_until(lambda: all(self.zero(rank).log for rank in range(3)))

    def kill(self, rank: int) -> None:
        """Close the rank's connection, as the kernel does when a process dies."""
        self.connection(rank).shutdown(socket.SHUT_RDWR)

    def connection(self, rank: int) -> socket.socket:
        return self.zero(rank).connection

    def zero(self, rank: int) -> Peer:
        """Return the rank's connection to rank 0."""
        zero = self.lines[rank]._zero
        assert zero is not None
        return zero

    def all_hear(self, *ranks: int) -> Failure:
        first, *other_items = [self.heard[rank].get(timeout=PATIENCE) for rank in ranks]
        assert all(other == first for other in other_items)
        return first


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(module, "VERDICT_TIME", PATIENCE)
    monkeypatch.setattr(module.hosts, "exchange", lambda name, value: [value])
    return Ranks(tmp_path)


def failure(rank: int, user_fixable: bool = False) -> Failure:
    return Failure(
        rank, f"Traceback of {rank}", exit_code=2 if user_fixable else 1, user_fixable=user_fixable, time=1.0
    )


@pytest.mark.parametrize("end", ["", "; its last log line: out of words"])
def test_lost_connection_is_reported_with_last_activity(ranks: Ranks, end: str) -> None:
    if end:
        ranks.logs[2].write_text("first\n  out of words\n\n")
    ranks.lines[2].report_activity('in phase "data"')
    ranks.lines[2].report_activity('in phase "step" after step 11')
    ranks.kill(2)
    hear = ranks.all_hear(0, 1)
    place = f'rank 2 on {HOST} died in phase "step" after step 11 (it was killed, or its host is down)'
    assert hear.text == f"{place}{end}; its log: {ranks.logs[2]}"
    assert (hear.rank, hear.exit_code, hear.silent) == (2, PEER_EXIT_CODE, True)


def test_rank_that_signs_off_is_not_reported(ranks: Ranks) -> None:
    ranks.lines[2].send_goodbye()
    ranks.kill(2)
    ranks.kill(1)
    assert ranks.all_hear(0).rank == 1


def test_rank_0_departure_is_not_reported(ranks: Ranks) -> None:
    ranks.lines[0].send_goodbye()
    wait_until(lambda: ranks.lines[1].rank_0_has_ended)
    assert ranks.lines[1].fail(failure(1)) == failure(1)
    assert all(heard.empty() for heard in ranks.heard)


def test_failing_rank_learns_original_failure(ranks: Ranks) -> None:
    ranks.kill(2)
    first = ranks.lines[1].fail(failure(1))  # reports only the lost connection
    assert first.rank == 2
    assert ranks.all_hear(0, 1) == first


def test_first_traceback_wins_with_rank_and_log(ranks: Ranks) -> None:
    first = ranks.lines[1].fail(failure(1))
    assert ranks.lines[0].fail(failure(0)) == ranks.all_hear(0, 1, 2) == first
    assert first.text == f"rank 1 on {HOST} failed; its log: {ranks.logs[1]}\n\nTraceback of 1"


def test_user_message_wins_over_earlier_traceback(ranks: Ranks) -> None:
    ranks.lines[1]._send({"failure": failure(1).__dict__})
    assert ranks.lines[2].fail(failure(2, user_fixable=True)) == failure(2, user_fixable=True) == ranks.all_hear(0, 1)


def test_killed_rank_wins_over_lost_connection_error(ranks: Ranks) -> None:
    ranks.kill(2)
    assert ranks.lines[1].fail(failure(1, user_fixable=True)).rank == 2
    assert ranks.all_hear(0, 1).silent


def test_killed_rank_wins_over_earlier_traceback(ranks: Ranks) -> None:
    ranks.lines[1]._send({"failure": failure(1).__dict__})
    time.sleep(0.1)
    ranks.kill(2)
    assert ranks.all_hear(0, 1).rank == 2


def test_death_before_log_is_reported_without_log(ranks: Ranks) -> None:
    ranks.lines[2].report_log("")
    ranks.kill(2)
    assert ranks.all_hear(0, 1).text == f"rank 2 on {HOST} died during startup (it was killed, or its host is down)"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b'{"token": "guessed", "rank": 1}\n', b"x" * 10_000])
def test_unauthenticated_connection_is_ignored(ranks: Ranks, said: bytes) -> None:
    with socket.create_connection(ranks.connection(1).getpeername()) as stranger:
        stranger.sendall(said)
    ranks.kill(2)
    assert ranks.all_hear(0, 1).rank == 2


def test_forked_child_does_not_hold_connection(ranks: Ranks) -> None:
    descriptor = ranks.connection(1).fileno()
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_silent_host_is_probed_and_reported_dead(ranks: Ranks) -> None:
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    connection = ranks.connection(1)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 4, 30_000]


def test_stop_signal_reaches_all_ranks(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: Queue[str] = Queue()
    monkeypatch.setattr(module, "request_stop", signals.put)
    ranks.lines[2].report_stop("SIGUSR1")
    assert [signals.get(timeout=PATIENCE) for _ in range(3)] == ["SIGUSR1"] * 3
    assert all(heard.empty() for heard in ranks.heard)
