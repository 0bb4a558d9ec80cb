"""Media inside other files: archives, and tables that hold the bytes. Each is put into the cache once, as files."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

from dsreason.config.cache import cache_dir
from dsreason.errors import DataError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
MAX_UNPACKED_BYTES = 2 * 1024**4
"""An archive that says it holds more is refused."""


def media_cache() -> Path:
    own = os.environ.get("COSMOS_CACHE")
    return Path(own) if own else cache_dir()


def embedded_file(content: bytes, suffix: str = "") -> Path:
    """A file with this content, named after its hash. Safe in several processes at once."""
    name = hashlib.sha256(content).hexdigest()
    file = media_cache() / "media" / name[:2] / f"{name}{suffix}"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partial:
            partial.write(content)
        os.chmod(partial.name, 0o644)  # the cache may be shared
        os.rename(partial.name, file)
    return file


def unpack(archive: Path) -> Path:
    """The folder with the archive's files, in `$COSMOS_CACHE` or the cache folder. Safe in several processes at once.

    An archive that has changed (size or time) is unpacked anew. No member can leave the folder.

    Raises:
        DataError: the archive is damaged, or a member wants out of its folder.
    """
    stat = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = media_cache() / "archives" / f"{archive.name.split('.')[0]}-{key}"
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
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as file:
                check_size(archive, sum(member.file_size for member in file.infolist()))
                file.extractall(folder)  # drops "..", drive letters and leading slashes
            return
        with tarfile.open(archive) as tar:
            size = 0
            for member in tar:
                size += member.size
                check_size(archive, size)
                tar.extract(member, folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError, RuntimeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(f"{archive}: cannot be unpacked: {error}") from error


def check_size(archive: Path, size: int) -> None:
    if size > MAX_UNPACKED_BYTES:
        raise DataError(f"{archive}: holds more than {MAX_UNPACKED_BYTES} bytes; unpack it yourself")
