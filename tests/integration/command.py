"""Running the command as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-P", "-m", "dsreason"]
"""`dsreason`, also where no script of that name is installed; like a script it does not import from the current folder."""


def dsreason(*arguments: object, cwd: Path, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """`dsreason …` with nothing activated: neither ninja nor the interpreter's folder on PATH."""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment["PATH"] = "/usr/bin:/bin"
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
