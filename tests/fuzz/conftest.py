"""Fixtures that let each fuzz test run for --fuzz-seconds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.fuzz.fuzzing import Fuzz, run_rounds


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    seconds, first = request.config.getoption("fuzz_seconds"), request.config.getoption("fuzz_round")
    return partial(run_rounds, seconds=seconds, first=first)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
