"""Files and folders on the local disk: hashes, small files, and checks."""

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
"""Maximum size of a small file of dsreason: a lock, a marker, a record of a run."""
END_BYTES = 64 * 1024


def to_os_error(error: Exception) -> OSError | None:
    """Return the OS error, also one that a Rust library reports: `I/O error: No space left on device (os error 28)`."""
    if isinstance(error, OSError):
        return error
    match = re.search(r"\(os error ([0-9]{1,4})\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def compute_sha256(file: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def hash_end(file: Path) -> str:
    """Compute the SHA-256 of the last 64 KiB, in hexadecimal digits: one read, however long the file is.

    A zip archive, which torch writes, ends with a checksum of each of its parts, so any change of the archive changes its end.
    """
    with file.open("rb") as content:
        content.seek(max(0, content.seek(0, os.SEEK_END) - END_BYTES))
        return hashlib.sha256(content.read()).hexdigest()


def read_small(file: Path, most: int | None = None) -> bytes:
    """Read a small file of dsreason (up to `MOST_BYTES`, or `most`) without blocking on anything that is not a file.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large; `strerror` says which.
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
    """Raise OSError unless the open descriptor or the path is a regular file."""
    if not stat.S_ISREG(os.stat(opened).st_mode):
        raise OSError(errno.EINVAL, "is not a file", str(file))


def remove(path: Path) -> None:
    """Delete a folder, a file or a link, if it exists; the target of a link is kept."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path, option: str) -> None:
    """Create a folder; raise ConfigError, naming the option, if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder}: the folder cannot be created ({error.strerror}); choose another one"
        ) from None


def check_writable(folder: Path, option: str) -> None:
    """Raise ConfigError, naming the option, if no file can be created in the folder.

    It creates and removes a temporary file in the folder, or in the nearest parent that exists.
    """
    existing = folder
    try:
        existing = find_existing(folder)
        if not existing.is_dir():
            raise ConfigError(f"{folder}: {existing} is a file, not a folder; choose another {option}")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: {existing} cannot be written to ({error.strerror}); choose another {option}, or get write permission"
        ) from None


def find_existing(path: Path) -> Path:
    """Return the path, or the nearest parent that exists."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file of dsreason; empty if it cannot be read, because its content can be recomputed."""
    try:
        document = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
