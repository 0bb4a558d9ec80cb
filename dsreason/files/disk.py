"""What is on the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from dsreason.errors import ConfigError

MOST_BYTES = 64 * 1024**2
"""Of a small file of ours: a lock, a marker, what a run remembers."""
END_BYTES = 64 * 1024


def as_os_error(error: Exception) -> OSError | None:
    """The error of the machine, also as libraries written in Rust tell it: `I/O error: No space left on device (os error 28)`."""
    if isinstance(error, OSError):
        return error
    match = re.search(r"\(os error ([0-9]{1,4})\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def sha256_of(file: Path) -> str:
    """In hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def digest_of_end(file: Path) -> str:
    """SHA-256 of the last 64 KiB, in hexadecimal digits: one read, however long the file is.

    A zip archive, which torch writes, ends with a checksum of each of its parts: it differs wherever the archive does.
    """
    with file.open("rb") as content:
        content.seek(max(0, content.seek(0, os.SEEK_END) - END_BYTES))
        return hashlib.sha256(content.read()).hexdigest()


def read_small(file: Path, most: int | None = None) -> bytes:
    """The content of a small file of ours (`MOST_BYTES`, or `most`), opened in a way that nothing else than a file can stop.

    Raises:
        OSError: it cannot be read, is no file, or is larger than such a file can be; `strerror` says which.
    """
    most = MOST_BYTES if most is None else most
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        check_regular(descriptor, file)
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most} bytes", str(file))
    return content


def check_regular(opened: int | Path, file: Path) -> None:
    """Raise OSError if something that is open, or at this place, is no file."""
    if not stat.S_ISREG(os.stat(opened).st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(file))


def remove(path: Path) -> None:
    """Delete a folder, a file or a link, if there is one; where a link leads, all stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path, option: str) -> None:
    """ConfigError that names the option where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder}: cannot be made a folder ({error.strerror}); choose another one"
        ) from None


def check_writable(folder: Path, option: str) -> None:
    """Really create a file in the folder, or in the nearest one above it that exists; it goes at once.

    ConfigError that names the option which says where.
    """
    existing = folder
    try:
        existing = existing_part(folder)
        if not existing.is_dir():
            raise ConfigError(f"{folder}: {existing} is a file, not a folder; choose another {option}")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written in {existing} ({error.strerror}); choose another {option}, or get write permission"
        ) from None


def existing_part(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file of ours; empty if there is none that can be read: what it remembers can be found out again."""
    try:
        document = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
