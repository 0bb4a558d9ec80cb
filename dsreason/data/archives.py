"""Archives of media files, unpacked once into the cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
from pathlib import Path

from dsreason.config.cache import cache_dir
from dsreason.errors import DataError

MAX_UNPACKED_BYTES = 2 * 1024**4
"""An archive that says it holds more is refused."""


def unpack(archive: Path) -> Path:
    """The folder with the archive's files, in `$COSMOS_CACHE` or the cache folder. Safe in several processes at once.

    An archive that has changed (size or time) is unpacked anew. No member can leave the folder (tarfile's data filter).

    Raises:
        DataError: the archive is damaged, or a member wants out of its folder.
    """
    stat = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    own = os.environ.get("COSMOS_CACHE")
    folder = (Path(own) if own else cache_dir()) / "archives" / f"{archive.name.split('.')[0]}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            extract(archive, partial)
            partial.rename(folder)
    return folder


def extract(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as file:
            size = 0
            for member in file:
                size += member.size
                if size > MAX_UNPACKED_BYTES:
                    raise DataError(f"{archive}: holds more than {MAX_UNPACKED_BYTES} bytes; unpack it yourself")
                file.extract(member, folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(f"{archive}: cannot be unpacked: {error}") from error
