"""Signals to one rank: the first requests a stop, and its repetitions by a launcher do not count as a second one."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dsreason.job import signals, stop
from dsreason.job.stop import StopRequest


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """A list of the SIGTERMs that would have ended this process."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_same_signal_sent_twice_requests_one_stop(ended: list[int]) -> None:
    with StopRequest() as request:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
    assert request.name == "SIGTERM"
    assert ended == []


def test_later_second_signal_ends_process_immediately(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_TIME", 0.0)
    with StopRequest() as request:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
    assert request.name == "SIGTERM"
    assert ended == [signal.SIGTERM]


def test_repeated_early_warnings_do_not_end_process(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ECHO_TIME", 0.0)
    with StopRequest() as request:
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
    assert request.name == "SIGUSR1"


def test_signal_to_any_rank_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "gather_objects", lambda own: [own, "SIGTERM", ""])
    with StopRequest() as request:
        assert request.asked() == "SIGTERM"
    monkeypatch.setattr(stop, "gather_objects", lambda own: [own, "", ""])
    with StopRequest() as request:
        assert request.asked() == ""


def test_signal_is_passed_on_while_main_thread_waits() -> None:
    """Simulate a rank in a collective, which waits in C code until all other ranks have entered it."""
    reported: list[tuple[str, float]] = []
    lifeline: Any = SimpleNamespace(report_stop=lambda name: reported.append((name, time.monotonic())))
    with StopRequest() as request:
        request.share(lifeline)
        signal.pthread_sigmask(
            signal.SIG_BLOCK, [signal.SIGTERM]
        )  # another thread gets the signal, so `sleep` is not interrupted
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            ctypes.CDLL(None).sleep(1)
            end = time.monotonic()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        ((name, passed_on),) = reported
    assert name == "SIGTERM"
    assert passed_on < end - 0.5


def test_forked_process_does_not_pass_signals_on() -> None:
    with StopRequest() as request:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.2)
        assert request.name == ""


def test_previous_signal_handlers_are_restored(ended: list[int]) -> None:
    with StopRequest():
        pass
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]
