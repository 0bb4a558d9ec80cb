"""The cache folder for files that can be recreated: tiny models, the built-in task and unpacked archives.

Whenever copies or unpacked files are used, they are compared with a record of their sizes, times and hashes. Otherwise, a
truncated copy would be used forever.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

from dsreason.errors import ConfigError, StorageError
from dsreason.files.atomic import build_once, build_or_replace, hold_lock, write_file
from dsreason.files.disk import compute_sha256, read_small, to_os_error

log = logging.getLogger(__name__)

RECORDS = ".records"
"""Name of the folder with the records; it is next to the copies."""
MOST_RECORD_BYTES = 2**30
PARALLEL = 8
"""Number of files to read at the same time."""
ROOT = Path("/")


class FileRecord(NamedTuple):
    """A file's size, times and hash when it was written. Any later write changes the times, but so does copying the cache."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str

    def matches(self, status: os.stat_result) -> bool:
        """Return whether a file still has this size and these times, in which case its content need not be read."""
        return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) == self[:3]


def get_cache_dir() -> Path:
    """Return `$DSREASON_CACHE`, or else `$COSMOS_CACHE`, or else `dsreason` in `$XDG_CACHE_HOME` or `~/.cache`."""
    folder = os.environ.get("DSREASON_CACHE") or os.environ.get("COSMOS_CACHE")
    try:
        if folder:
            return Path(folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsreason"
    except RuntimeError as error:
        raise ConfigError(f"cannot determine the cache folder: {error}; set HOME or DSREASON_CACHE") from None


@contextmanager
def convert_cache_errors(path: Path, variable: str) -> Iterator[None]:
    """Convert OS errors in the block to a StorageError, because an unwritable cache is not a fault in the data.

    `variable` is the environment variable that sets the cache folder.
    """
    try:
        yield
    except Exception as error:
        if (cause := to_os_error(error)) is None:
            raise
        raise StorageError(
            f"{path}: cannot be written: {cause}; free disk space, or set {variable} to another folder"
        ) from error


def build_copy(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return `folder` like `build_once`, but build it again, with a warning, if any of its files has been damaged.

    The files are compared with a record that was written when the folder was built; see `find_damage`. A folder that an older
    version built without a record gets one. A damaged folder is replaced only once the new one is complete.
    """
    record = folder.parent / RECORDS / f"{folder.name}.json"

    def build_and_record(partial: Path) -> None:
        build(partial)
        write_record(record, record_folder(partial))

    if folder.is_dir() and not record.exists():
        adopt_copy(record, folder)
    elif folder.is_dir() and find_damage(record, folder):
        with hold_lock(folder):
            # another process may have rebuilt the folder while this process waited for the lock
            if folder.is_dir() and (damage := find_damage(record, folder)):
                log.warning("%s: %s; rebuilding this copy", folder, damage)
                build_or_replace(folder, build_and_record)
    return build_once(folder, build_and_record)


def adopt_copy(record: Path, folder: Path) -> None:
    """Write a record for a copy that an older version made, if the cache is writable."""
    if not os.access(folder.parent, os.W_OK):
        warn_unrecorded(folder.parent)
        return
    log.info("%s was made by an older version; recording its files now", folder)
    write_record(record, record_folder(folder))


@cache
def warn_unrecorded(cache_folder: Path) -> None:
    log.warning(
        "%s is read-only and contains copies without a record, so damage to them would go unnoticed", cache_folder
    )


def record_folder(folder: Path) -> dict[str, FileRecord]:
    """Read all regular files in a folder, and return their records by relative path. Links are skipped."""
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    return record_files((str(file.relative_to(folder)) for file in files if stat.S_ISREG(file.lstat().st_mode)), folder)


def record_files(names: Iterable[str], folder: Path = ROOT) -> dict[str, FileRecord]:
    """Read several files at a time, and return their records by name; `names` are relative to `folder`."""
    listed = [*names]
    if len(listed) < 2:
        return {name: record_file(folder / name) for name in listed}
    with ThreadPool(PARALLEL) as threads:
        return dict(zip(listed, threads.imap(lambda name: record_file(folder / name), listed), strict=True))


def record_file(file: Path) -> FileRecord:
    status = file.stat()
    return FileRecord(status.st_size, status.st_mtime_ns, status.st_ctime_ns, compute_sha256(file))


def read_record(record: Path) -> dict[str, FileRecord] | None:
    """Read the records from a file; return None if it is missing or damaged."""
    from pydantic import TypeAdapter  # imported on demand, because reward workers import this module

    try:
        return TypeAdapter(dict[str, FileRecord]).validate_json(read_small(record, MOST_RECORD_BYTES))
    except (OSError, ValueError):
        return None


def write_record(record: Path, files: Mapping[str, FileRecord]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    write_file(record, json.dumps(files))


def find_damage(record: Path, folder: Path = ROOT) -> str | None:
    """Describe the first file that differs from its record; return None if all match. Files without a record are ignored.

    Sizes and times are compared first. The content is read only if the times differ but the size does not.
    """
    recorded = read_record(record)
    if recorded is None:
        return "has no valid record of its files"
    touched = []
    for name, before in recorded.items():
        try:
            status = os.lstat(os.path.join(folder, name))
        except OSError:
            return f"{name} is missing"
        if status.st_size != before.size or not stat.S_ISREG(status.st_mode):
            return f"{name} has {status.st_size} bytes instead of {before.size}"
        if not before.matches(status):
            touched.append(name)
    current = record_files(touched, folder)
    if changed := next((name for name in touched if current[name].sha256 != recorded[name].sha256), None):
        return f"the content of {changed} has changed"
    if touched:
        with suppress(OSError):  # if the cache is read-only, each process reads the content
            write_record(record, recorded | current)
    return None
