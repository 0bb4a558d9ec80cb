"""Regular expressions must not backtrack over untrusted text: 20,000 characters take milliseconds, not seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.unit.hostile.expressions import ROOT, Use, slow_text


@pytest.mark.nightly
def test_every_expression_runs_in_linear_time() -> None:
    """Run in a separate process, because the check imports every module that has an expression."""
    command = [sys.executable, "-m", "tests.unit.hostile.expressions"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=True)
    *slow, count = ended.stdout.splitlines()
    assert slow == []
    assert int(count) > 200


@pytest.mark.parametrize("pattern", [r"\s+$", r"(.+)x", r"(a|a)*b", r"(\w+\s*)+:", r"\d+(?:,\d+)*;"])
def test_slow_pattern_is_detected(pattern: str) -> None:
    assert slow_text(Use("here", "search", re.compile(pattern)))


@pytest.mark.parametrize("pattern", [r"\s$", r"(?:.+)", r"<a>[^<]*</a>", r"(?<!\d)\d+;", r"a{0,9}b"])
def test_linear_time_pattern_is_accepted(pattern: str) -> None:
    assert not slow_text(Use("here", "search", re.compile(pattern)))
