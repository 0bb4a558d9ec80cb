"""Helpers that run the `dsreason` command as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-P", "-m", "dsreason"]
"""Command line for `dsreason` that works without an installed script. Like a script, it does not import modules from the
current folder."""


def dsreason(*arguments: object, cwd: Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run `dsreason …` as from an inactive environment: neither ninja nor the folder of the interpreter is on PATH."""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment["PATH"] = "/usr/bin:/bin"
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
