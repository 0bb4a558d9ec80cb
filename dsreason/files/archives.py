"""Packed files, and media inside other files: archives, and tables that hold the bytes. Media are put into the cache once."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dsreason.errors import DISK_ERRORS, DataError, StorageError
from dsreason.files.atomic import build_once, write_file
from dsreason.files.cache import cache_dir, cache_errors

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
MAX_UNPACKED_BYTES = 2 * 1024**4
"""An archive that unpacks to more is refused."""
MAX_RATIO, SMALL_BYTES = 100, 256 * 1024**2
"""So is one that unpacks to more than this many times its size; but any archive may unpack to the latter."""
PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
"""How to open a file that begins like this."""
PACKED_OTHERWISE = (b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"Rar!\x1a\x07", b"7z\xbc\xaf\x27\x1c")
BLOCK_BYTES = 4096
"""Counted for each member beside its size: empty files fill a disk too."""
MAX_NAME_BYTES = 16 * 1024
NAME_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Tar members that hold a long name for the next one; longer ones than `MAX_NAME_BYTES` are refused."""
UNPACK_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    OverflowError,
    LookupError,
    MemoryError,
)
"""What the readers of the standard library raise on damaged input."""


def media_cache() -> Path:
    """`$COSMOS_CACHE`, also where `$DSREASON_CACHE` names another folder for the rest; else `cache_dir`."""
    folder = os.environ.get("COSMOS_CACHE")
    return Path(folder).expanduser() if folder else cache_dir()


def embedded_file(content: bytes, suffix: str = "") -> Path:
    """A file with this content, named after its hash. Safe in several processes at once.

    `suffix` comes with the data: what is no usual one is left out.

    Raises:
        DataError: the content is no bytes.
        StorageError: the cache cannot be written; this is no fault of the data.
    """
    if not isinstance(content, bytes):
        raise DataError(f"the content of a media file must be bytes, is {type(content).__name__}")
    suffix = suffix if re.fullmatch(r"\.\w{1,16}", suffix, re.ASCII) else ""
    name = hashlib.sha256(content).hexdigest()
    file = media_cache() / "media" / name[:2] / f"{name}{suffix}"
    if not file.is_file():
        with cache_errors(file, "COSMOS_CACHE"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, content)
    return file


def unpack(archive: Path) -> Path:
    """The folder with the archive's files, in `$COSMOS_CACHE` or the cache folder. Safe in several processes at once.

    An archive that has changed (size or time) is unpacked again. No member can leave the folder.

    Raises:
        DataError: the archive is damaged, or a member wants out of its folder.
        StorageError: the cache cannot be written; this is no fault of the data.
    """
    status = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = media_cache() / "archives" / f"{archive.name.split('.')[0]}-{key}"

    def extract_anew(partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        extract(archive, partial)

    with cache_errors(folder, "COSMOS_CACHE"):
        return build_once(folder, extract_anew)


def extract(archive: Path, folder: Path) -> None:
    """Unpack a tar (plain, gz, bz2, xz) or zip into `folder`, which is removed again where that fails.

    Raises:
        DataError: the archive is damaged, encrypted or a bomb, or a member is a link, a device, or wants out.
        StorageError: the disk is full or read-only.
    """
    try:
        with unpack_errors(archive), archive.open("rb") as file:
            unpack_members = extract_zip if file.read(2) == b"PK" else extract_tar
        unpack_members(archive, folder, Budget(archive))
    except (DataError, StorageError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def extract_zip(archive: Path, folder: Path, budget: Budget) -> None:
    with unpack_errors(archive), zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            budget.spend(BLOCK_BYTES + member.file_size)
            with unpack_errors(archive, member.filename):
                check_member(member.filename, is_link=stat.S_ISLNK(member.external_attr >> 16))
        for member in file.infolist():
            with unpack_errors(archive, member.filename):
                file.extract(member, folder)


def extract_tar(archive: Path, folder: Path, budget: Budget) -> None:
    with unpack_errors(archive), tarfile.open(archive, tarinfo=TarMember) as tar:
        for member in tar:
            budget.spend(BLOCK_BYTES + member.size)
            with unpack_errors(archive, member.name):
                check_member(member.name, is_link=member.issym() or member.islnk())
                tar.extract(member, folder, filter="data")
        while rest := tar.fileobj.read(BLOCK_BYTES):  # to the end of the file, where its checksum is
            budget.spend(len(rest))


class TarMember(tarfile.TarInfo):
    """A header; a damaged one is an error, where tarfile would take it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> TarMember:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise tarfile.ReadError(f"damaged header ({error})") from error
            raise  # the end of the archive
        if member.size < 0 or (member.type in NAME_TYPES and member.size > MAX_NAME_BYTES):  # read as a whole
            raise tarfile.ReadError(f"damaged header (size {member.size})")
        return member


def check_member(name: str, *, is_link: bool) -> None:
    """Symbolic links are refused wherever they lead: tarfile's own check can be deceived by chains of them
    (CVE-2025-4517, not fixed in Python 3.11 before 3.11.13 and 3.12 before 3.12.11)."""
    if os.path.isabs(name) or os.path.normpath(name).split("/")[0] == "..":
        raise tarfile.TarError("it would be extracted outside the destination")
    if is_link:
        raise tarfile.TarError("it is a symbolic link; unpack the archive yourself")


@contextmanager
def unpacked(file: Path) -> Iterator[IO[bytes]]:
    """The content of a file that may be packed (gz, bz2, xz).

    Raises:
        DataError: it is damaged, or packed in another way.
    """
    with file.open("rb") as content:
        start = content.read(8)
    if start.startswith(PACKED_OTHERWISE):
        raise DataError(
            f"{file}: is packed, as zip, zst, lz4, rar or 7z; a table may be packed as gz, bz2 or xz: unpack it"
        )
    opener = next((opener for magic, opener in PACKED.items() if start.startswith(magic)), open)
    with unpack_errors(file), opener(file, "rb") as content:
        yield content


class Budget:
    """How many bytes an archive, or a packed file, may unpack to."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.most = min(MAX_UNPACKED_BYTES, max(SMALL_BYTES, MAX_RATIO * archive.stat().st_size))
        self.spent = 0

    def spend(self, size: int) -> None:
        self.spent += size
        if self.spent > self.most:
            raise DataError(
                f"{self.archive}: unpacks to more than {self.most} bytes; unpack it yourself if you trust it"
            )


@contextmanager
def unpack_errors(archive: Path, member: str | None = None) -> Iterator[None]:
    """Errors as a DataError that names archive and member; those of the disk that it is unpacked on as a StorageError."""
    try:
        yield
    except UNPACK_ERRORS as error:
        inside = "" if member is None else f": {member[:200]!r}"
        cause = " ".join(str(error).split()) or type(error).__name__  # tarfile lists what it has tried on several lines
        text = f"{archive}{inside} cannot be unpacked: {cause}"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise StorageError(f"{text}; make room, or unpack it elsewhere (COSMOS_CACHE)") from error
        raise DataError(text) from error
