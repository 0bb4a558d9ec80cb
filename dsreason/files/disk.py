"""What is on the disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256_of(file: Path) -> str:
    """In hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def existing_part(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of ours; empty where there is none that can be read: what it remembers can be found out again."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
