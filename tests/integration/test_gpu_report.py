"""`python -m benchmarks.gpu_report` itself, with tiny sizes on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.gpu_report.parts import PARTS

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]


FIRST = ("environment", "zero", "head", "ledger_05b")
REPEATED = {"parity_fp32", "ledger_2b", "state_poison_qwen3_vl", "ledger_7b", "sft_zero2"}
"""Parts that repeat another part with a different size, family or precision."""


def report(parts: Iterable[str], out: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--parts", " ".join(parts), "--out", str(out)]
    remaining = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, cwd=ROOT, env=remaining, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_all_report_parts_run_and_are_merged(tmp_path: Path) -> None:
    report(FIRST, tmp_path)
    parts = [part for part in PARTS if part.name not in REPEATED]
    report([part.name for part in parts if part.name not in FIRST], tmp_path)
    records = json.loads((tmp_path / "gpu-report.json").read_text())["parts"]
    assert set(records) == {part.name for part in parts}
    with_goals = {part.name for part in parts if any(goal.on_cpu for goal in part.goals)}
    assert {name for name, record in records.items() if record["verdict"] == "ok"} == with_goals
    assert {record["verdict"] for record in records.values()} == {"ok", "measured"}
    assert all(record["device"] == "cpu" and record["tiny"] for record in records.values())
    measured = {row["name"]: row["value"] for record in records.values() for row in record["measurements"]}
    assert measured["steps"] == 4
    assert measured["padding, share of tokens"] == 0  # packed rows need no padding
    assert measured["as dsreason sets it: length 192 non-finite gradients"] == 0
    for file in ("gpu-report.json", "gpu-report.md"):
        text = (tmp_path / file).read_text()
        private = (f"{ROOT}", f"{tmp_path}", f"{Path.home()}/", socket.gethostname())
        assert [secret for secret in private if secret in text] == []
