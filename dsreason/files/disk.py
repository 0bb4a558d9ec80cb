"""Helpers for files and folders on the local disk: hashes, bounded reads, and checks."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.atomic import write_file
from dsreason.problems import describe_first_problem, describe_parse_error

if TYPE_CHECKING:
    from pydantic import TypeAdapter

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 1024**2
"""Maximum size, in bytes, of a small file written by dsreason: a lock, a marker or a run's `config.json`."""
MOST_REPORT_BYTES = 2**32
"""Maximum size, in bytes, of a report that is read again, such as `metrics.jsonl`."""
HUB_CACHE = re.compile(r"(models|datasets|spaces)--.+")
"""Pattern for folder names in the Hub's cache, such as `models--Qwen--Qwen2.5-VL-3B-Instruct`."""
END_BYTES = 64 * 1024
BLOCK_BYTES = 1024 * 1024


def to_os_error(error: Exception) -> OSError | None:
    """Convert an error to an OSError, even if a Rust library reports it (`I/O error: No space left on device (os error 28)`).

    Returns:
        The OSError; None if the error did not come from the operating system.
    """
    if isinstance(error, OSError):
        return error
    match = re.search(r"\(os error ([0-9]{1,4})\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


def compute_sha256(file: Path) -> str:
    """Compute a file's SHA-256 hash, as hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def hash_end(file: Path) -> str:
    """Compute the SHA-256 hash of a file's last 64 KiB, as hexadecimal digits, in a time that does not depend on its size.

    torch writes zip archives, which end with a checksum for each member, so any change to the content also changes the end.
    """
    with file.open("rb") as content:
        content.seek(max(0, content.seek(0, os.SEEK_END) - END_BYTES))
        return hashlib.sha256(content.read()).hexdigest()


def read_small(file: Path, max_bytes: int | None = None) -> bytes:
    """Read a file of at most `max_bytes` bytes (None: `MOST_BYTES`). Do not block if it is not a regular file, such as a FIFO.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large; `strerror` gives the reason.
    """
    max_bytes = MOST_BYTES if max_bytes is None else max_bytes
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        check_regular(descriptor, file)
        content = bytearray()  # read in blocks, because `read` allocates the requested size at once
        while len(content) <= max_bytes and (block := opened.read(min(BLOCK_BYTES, max_bytes + 1))):
            content += block
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than the maximum of {max_bytes} bytes", str(file))
    return bytes(content)


def check_regular(opened: int | Path, file: Path) -> None:
    """Raise OSError unless `opened`, an open file descriptor or a path, is a regular file."""
    if not stat.S_ISREG(os.stat(opened).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(file))


def set_aside(path: Path, reason: str) -> None:
    """Rename an unusable file or folder that is in the way of a report, and log a warning with the reason."""
    names = (path.with_name(f"{path.name}.{number}.unusable") for number in itertools.count(1))
    place = next(name for name in names if not os.path.lexists(name))
    path.rename(place)
    log.warning("%s: %s, so it was renamed to %s; a new file is written", path, reason, place.name)


def write_report(file: Path, content: str | bytes) -> None:
    """Write a file like `write_file`, but rename a folder that is in its place, because a report must not end a run."""
    if file.is_dir() and not file.is_symlink():
        set_aside(file, "is a folder")
    write_file(file, content)


def check_links(folder: Path) -> None:
    """Raise CheckpointError if a link in the folder leads outside it, because the link's target may be private."""
    for path in folder.rglob("*"):
        check_link(path, folder)


def check_link(path: Path, folder: Path) -> None:
    """Raise CheckpointError if `path`, which is in `folder`, leads outside it through a link or a linked parent folder.

    In the Hugging Face Hub's cache, links from `models--<name>/snapshots/<commit>/` to `models--<name>/blobs/` are allowed.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not (target.is_relative_to(root) or target.parent in list_blob_folders(root)):
        raise CheckpointError(
            f"{path}: is a link to {target}, which is outside the folder; replace the link with the file itself"
        )


def list_blob_folders(folder: Path) -> list[Path]:
    """Return the `blobs` folder of the Hub's cache, resolved if it is a link, if `folder` is in a snapshot; otherwise, []."""
    caches = [
        place.parent.parent
        for place in (folder, *folder.parents)
        if place.parent.name == "snapshots" and HUB_CACHE.fullmatch(place.parent.parent.name)
    ]
    return [Path(os.path.realpath(cache / "blobs")) for cache in caches]


def remove(path: Path) -> None:
    """Delete a folder, file or link if it exists; the target of a link is not deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_folder(folder: Path, option: str) -> None:
    """Create a folder; raise a ConfigError that names the option if the folder cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} {folder}: the folder cannot be created ({error.strerror}); choose another one"
        ) from None


def check_writable(folder: Path, option: str) -> None:
    """Raise a ConfigError that names the option if files cannot be created in the folder.

    The check creates and deletes a temporary file in the folder or, if it does not exist, in its nearest existing parent.
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
            f"{folder}: {existing} is not writable ({error.strerror}); choose another {option}, or change the permissions"
        ) from None


def find_existing(path: Path) -> Path:
    """Return the path if it exists, or else its nearest existing parent."""
    return next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())


def read_json_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file written by dsreason; return {} if that fails.

    The content of such files can be recomputed, so a damaged file is not an error.
    """
    try:
        document = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_valid_lines(file: Path, schema: TypeAdapter[Any]) -> tuple[list[dict[str, Any]], str]:
    """Read the objects in a JSON Lines file that match `schema`; return them with a description of the faulty lines ("" if none).

    Lines are split only at line feeds. `splitlines` would also split at characters such as U+2028, which JSON does not escape.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    from pydantic import ValidationError  # imported on demand, because reward workers import this module

    rows, problems = list[dict[str, Any]](), list[str]()
    for number, line in enumerate(read_small(file, MOST_REPORT_BYTES).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            schema.validate_python(row, strict=True)
            rows.append(row)
        except ValidationError as error:
            problems.append(f"line {number}: {describe_first_problem(error)}")
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {describe_parse_error(error)}")
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return rows, f"{problems[0]}{more}" if problems else ""
