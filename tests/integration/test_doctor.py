"""`dsreason doctor` on this machine: it sums over two real ranks and trains one real step of a tiny model with its engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import COMMAND


def run(folder: Path, *options: str, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    ended = subprocess.run(
        [*COMMAND, "doctor", "--json", *options],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended.returncode, {result["name"]: result for result in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.long
def test_doctor_passes_on_test_machine(tmp_path: Path) -> None:
    code, result = run(tmp_path)
    assert code == 0, result
    assert result["2 ranks"]["verdict"] == "pass"
    assert "sums are correct" in result["2 ranks"]["what"]
    assert result["engine"]["verdict"] == "pass"
    assert result["videos"]["verdict"] == "pass"


def test_doctor_suggests_remedy_for_broken_environment(tmp_path: Path) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CXX": "no-such-compiler", "MASTER_PORT": "x"}
    code, result = run(tmp_path, "--quick", **variables)
    assert code == 1
    for name in ("allocator", "C++ compiler", "ports"):
        assert result[name]["verdict"] == "fail"
        assert result[name]["cure"]
    assert "engine" not in result
