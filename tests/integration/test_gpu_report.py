"""`python -m benchmarks.gpu_report` itself, in tiny sizes on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_report.parts import PARTS

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[2]


def report(parts: str, out: Path, *, minutes: int = 10) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--parts", parts, "--out", str(out)]
    kept = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=60 * minutes)


def test_parts_run_without_a_gpu_and_two_calls_make_one_report_that_can_be_sent(tmp_path: Path) -> None:
    for parts in ("environment zero head ledger_05b", "attention sft"):
        ended = report(parts, tmp_path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    records = json.loads((tmp_path / "gpu-report.json").read_text())["parts"]
    assert {name: record["verdict"] for name, record in records.items()} == {
        "environment": "measured",
        "zero": "ok",
        "attention": "ok",
        "head": "measured",
        "ledger_05b": "measured",
        "sft": "measured",
    }
    assert all(record["device"] == "cpu" and record["tiny"] for record in records.values())
    measured = {row["name"]: row["value"] for record in records.values() for row in record["measurements"]}
    assert measured["steps"] == 4
    assert 0 < measured["padding, share of tokens"] < 1
    assert measured["as dsreason sets it: length 192 non-finite gradients"] == 0
    for file in ("gpu-report.json", "gpu-report.md"):
        text = (tmp_path / file).read_text()
        assert not any(secret in text for secret in (str(ROOT), str(tmp_path), str(Path.home()), socket.gethostname()))


def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    ended = report("", tmp_path, minutes=60)
    records = json.loads((tmp_path / "gpu-report.json").read_text())["parts"]
    assert set(records) == {part.name for part in PARTS}, ended.stdout + ended.stderr
    broken = {name: record for name, record in records.items() if record["verdict"] in ("failed", "timed out")}
    assert not broken
