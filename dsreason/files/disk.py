"""What is on the disk."""

from __future__ import annotations

import hashlib
from pathlib import Path


def sha256_of(file: Path) -> str:
    """In hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def existing_part(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
