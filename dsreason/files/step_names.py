"""Names of files and folders that belong to an optimizer step: checkpoints, exports and answer files."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "step_"


def format_step(step: int) -> str:
    """Format the name for a step: 12 → `step_12`."""
    return f"{PREFIX}{step}"


def is_step_name(name: str) -> bool:
    return re.fullmatch(rf"{PREFIX}(0|[1-9][0-9]*)", name) is not None


def parse_step(path: Path) -> int:
    """Parse the step number in a path: `.../step_12` → 12, `.../step_12.jsonl` → 12."""
    return int(path.name.partition(".")[0].removeprefix(PREFIX))
