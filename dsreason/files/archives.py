"""Reading of compressed files, and one-time extraction of media from archives and tables to the cache."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import logging
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
from dsreason.files.atomic import write_file
from dsreason.files.cache import build_copy, convert_cache_errors, get_cache_dir

log = logging.getLogger(__name__)

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")
PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
"""Suffixes of compressed files that contain a single file."""
MAX_UNPACKED_BYTES = 2 * 1024**4
"""Maximum unpacked size of an archive, in bytes; larger archives are rejected."""
MAX_RATIO, SMALL_BYTES = 100, 256 * 1024**2
"""Maximum ratio of unpacked to packed size, and the unpacked size in bytes up to which any ratio is accepted."""
PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
"""First bytes of a compressed file → function that opens the file."""
PACKED_OTHERWISE = (b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"Rar!\x1a\x07", b"7z\xbc\xaf\x27\x1c")
BLOCK_BYTES = 4096
"""Bytes added to each member's size, because even an empty file takes up disk space."""
MAX_NAME_BYTES = 16 * 1024
NAME_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Types of tar members that hold a long name for the next member; names longer than `MAX_NAME_BYTES` are rejected."""
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
"""Errors that the standard library's readers raise for damaged files."""


def get_media_cache() -> Path:
    """Return `$COSMOS_CACHE` if it is set, regardless of `$DSREASON_CACHE`; otherwise, return `get_cache_dir()`."""
    folder = os.environ.get("COSMOS_CACHE")
    return Path(folder).expanduser() if folder else get_cache_dir()


def write_embedded(content: bytes, suffix: str = "") -> Path:
    """Write the content to a file in the media cache, named after its hash, and return the path.

    Several processes may call this function at the same time. `suffix` comes from the data and is dropped unless it is a
    plain file extension.

    Raises:
        DataError: the content is not of type `bytes`.
        StorageError: the cache is not writable, which is not a fault in the data.
    """
    if not isinstance(content, bytes):
        raise DataError(f"the content of a media file must be bytes; got {type(content).__name__}")
    return write_cached(content, suffix if re.fullmatch(r"\.\w{1,16}", suffix, re.ASCII) else "")


def write_cached(content: bytes, suffix: str) -> Path:
    """Write the content to a file in the media cache, named after its hash and `suffix`, and return the path.

    Several processes may call this function at the same time. An existing file with different content is damaged and is replaced.

    Raises:
        StorageError: the cache is not writable.
    """
    name = hashlib.sha256(content).hexdigest()
    file = get_media_cache() / "media" / name[:2] / f"{name}{suffix}"
    with convert_cache_errors(file, "COSMOS_CACHE"):
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, content)
        elif file.stat().st_size != len(content) or file.read_bytes() != content:
            log.warning("%s was damaged after it was unpacked; writing it again", file)
            write_file(file, content)
    return file


def unpack(archive: Path) -> Path:
    """Unpack an archive into the media cache, unless that has been done before, and return the folder with its members.

    Several processes may call this function at the same time. An archive is unpacked again if its size or modification time
    has changed, or if an unpacked member has been damaged.

    Raises:
        DataError: the archive is damaged, or a member would be written outside the folder.
        StorageError: the cache is not writable, which is not a fault in the data.
    """
    status = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = get_media_cache() / "archives" / f"{archive.name.split('.')[0]}-{key}"

    def extract_from_scratch(partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        extract(archive, partial)

    with convert_cache_errors(folder, "COSMOS_CACHE"):
        return build_copy(folder, extract_from_scratch)


def extract(archive: Path, folder: Path) -> None:
    """Unpack a tar (plain, gz, bz2 or xz) or zip archive into `folder`, which is deleted on failure.

    Raises:
        DataError: the archive is damaged, encrypted or a decompression bomb, or a member is a link, is a device, or would be
            written outside `folder`.
        StorageError: the disk is full or read-only.
    """
    try:
        with convert_unpack_errors(archive), archive.open("rb") as file:
            unpack_members = extract_zip if file.read(2) == b"PK" else extract_tar
        unpack_members(archive, folder, Budget(archive))
    except (DataError, StorageError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def extract_zip(archive: Path, folder: Path, budget: Budget) -> None:
    with convert_unpack_errors(archive), zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            budget.spend(BLOCK_BYTES + member.file_size)
            with convert_unpack_errors(archive, member.filename):
                check_member(member.filename, is_link=stat.S_ISLNK(member.external_attr >> 16))
        for member in file.infolist():
            with convert_unpack_errors(archive, member.filename):
                file.extract(member, folder)


def extract_tar(archive: Path, folder: Path, budget: Budget) -> None:
    with convert_unpack_errors(archive), tarfile.open(archive, tarinfo=TarMember) as tar:
        for member in tar:
            budget.spend(BLOCK_BYTES + member.size)
            with convert_unpack_errors(archive, member.name):
                check_member(member.name, is_link=member.issym() or member.islnk())
                tar.extract(member, folder, filter="data")
        while padding := tar.fileobj.read(BLOCK_BYTES):  # reading to the end verifies the file's checksum
            budget.spend(len(padding))


class TarMember(tarfile.TarInfo):
    """A tar header that raises an error if it is damaged; tarfile itself would treat it as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> TarMember:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise tarfile.ReadError(f"damaged header ({error})") from error
            raise  # an all-zero header marks the end of the archive
        # Long names are limited because tarfile reads the entire name into memory.
        if member.size < 0 or (member.type in NAME_TYPES and member.size > MAX_NAME_BYTES):
            raise tarfile.ReadError(f"damaged header (size {member.size})")
        return member


def check_member(name: str, *, is_link: bool) -> None:
    """Raise TarError if a member is a link or would be written outside the folder.

    Links are rejected regardless of their target, because a chain of links can bypass tarfile's check (CVE-2025-4517, fixed in
    Python 3.11.13 and 3.12.11).
    """
    if os.path.isabs(name) or os.path.normpath(name).split("/")[0] == "..":
        raise tarfile.TarError("it would be extracted outside the destination")
    if is_link:
        raise tarfile.TarError("it is a symbolic link; unpack the archive yourself")


@contextmanager
def open_unpacked(file: Path) -> Iterator[IO[bytes]]:
    """Open a file, which may be compressed (gz, bz2 or xz), to read its uncompressed content.

    Raises:
        DataError: the file is damaged, or its compression format is not supported.
    """
    with file.open("rb") as content:
        start = content.read(8)
    if start.startswith(PACKED_OTHERWISE):
        raise DataError(
            f"{file}: is compressed as zip, zst, lz4, rar or 7z, but tables are supported only uncompressed or as gz, bz2 or "
            "xz; unpack it"
        )
    opener = next((opener for magic, opener in PACKED.items() if start.startswith(magic)), open)
    with convert_unpack_errors(file), opener(file, "rb") as content:
        yield content


def unpack_file(file: Path) -> Path:
    """Unpack a compressed file (gz, bz2 or xz) into the media cache, unless that has been done before; return the unpacked file.

    Raises:
        DataError: the file is damaged, or unpacks to more bytes than `Budget` allows.
        StorageError: the cache is not writable, which is not a fault in the data.
    """
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = get_media_cache() / "archives" / f"{file.name.split('.')[0]}-{key}"

    def write_content(partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        budget = Budget(file)
        try:
            with open_unpacked(file) as content, (partial / file.stem).open("wb") as target:
                for block in iter(lambda: content.read(1 << 20), b""):
                    budget.spend(len(block))
                    target.write(block)
        except (DataError, StorageError):
            shutil.rmtree(partial, ignore_errors=True)
            raise

    with convert_cache_errors(folder, "COSMOS_CACHE"):
        return build_copy(folder, write_content) / file.stem


class Budget:
    """A limit on the number of bytes to which an archive or compressed file may expand."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.max_bytes = min(MAX_UNPACKED_BYTES, max(SMALL_BYTES, MAX_RATIO * archive.stat().st_size))
        self.spent = 0

    def spend(self, size: int) -> None:
        self.spent += size
        if self.spent > self.max_bytes:
            raise DataError(
                f"{self.archive}: unpacks to more than the maximum of {self.max_bytes} bytes; unpack it yourself if you trust it"
            )


@contextmanager
def convert_unpack_errors(archive: Path, member: str | None = None) -> Iterator[None]:
    """Convert errors in the block to a DataError that names archive and member, or to a StorageError if the disk is at fault."""
    try:
        yield
    except UNPACK_ERRORS as error:
        inside = "" if member is None else f": {member[:200]!r}"
        cause = " ".join(str(error).split()) or type(error).__name__  # tarfile lists all attempts, one per line
        text = f"{archive}{inside} cannot be unpacked: {cause}"
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise StorageError(f"{text}; free disk space, or set COSMOS_CACHE to another folder") from error
        raise DataError(text) from error
