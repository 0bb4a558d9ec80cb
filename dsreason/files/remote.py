"""Local copies of S3 objects. Each object is fetched into the cache once, atomically, no matter how many processes need it.

The path of a copy contains the bucket and a hash of the key, ETag, size and time, so an object that was replaced is fetched
again. An interrupted fetch resumes where it stopped, even in a later run. Each process checks only once per object whether the
object has changed or its copy has been damaged.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath

from dsreason.errors import DataError, StorageError
from dsreason.files.address import S3Address, is_s3, parse_s3
from dsreason.files.cache import build_copy, convert_cache_errors, get_cache_dir
from dsreason.files.s3 import S3Object, find_object, list_objects, read_into
from dsreason.secrets import mask_credentials

log = logging.getLogger(__name__)

PARALLEL = 8
"""Number of files in a folder to fetch concurrently."""
REMEMBERED = 200_000
"""Number of objects for which a process remembers the path of the local copy."""
SHOWN_BYTES = 100_000_000
"""Size in bytes from which the fetch of an object is logged."""


def read_address(text: str) -> S3Address:
    """Parse an `s3://…` URL; raise DataError if it is invalid."""
    try:
        return parse_s3(text)
    except ValueError as error:
        raise DataError(str(error)) from None


def check_location(key: str, text: str) -> None:
    """Raise DataError for a URL that is not an S3 URI. It would be used as a path, and a password in it would be displayed."""
    if is_s3(text):
        read_address(text)
    elif "://" in text:
        raise DataError(
            f"{key}: {mask_credentials(text)} is a URL, but only local files, s3:// URIs and data sets on the Hub are "
            "supported; download it first"
        )


def join_address(folder: S3Address, relative: str) -> S3Address:
    """Return the URL of the object at `relative` below `folder`; raise DataError if the path leaves the folder."""
    if ".." in PurePosixPath(relative).parts:
        raise DataError(f"{relative} is outside {folder}; set data.media_path, or use full URIs")
    return folder / str(PurePosixPath(relative))


def fetch_file(text: str) -> Path:
    """Return the path of an object's local copy, fetching the object if necessary.

    Raises:
        DataError: the URL is invalid, or the object does not exist.
        StorageError: S3 cannot be reached or refuses the request, which is not a fault in the data.
    """
    copy = _fetch_copy(text)
    if not copy.is_file():  # the cache folder was cleared in the meantime
        _fetch_copy.cache_clear()
        copy = _fetch_copy(text)
    return copy


@lru_cache(REMEMBERED)
def _fetch_copy(text: str) -> Path:
    address = read_address(text)
    if not address.key:
        raise DataError(f"{address}: is a bucket, not a file; append the path of the file")
    try:
        source = find_object(address)
    except StorageError as error:
        if error.status == 404:
            raise DataError(
                f"{address}: the object or the bucket {address.bucket} does not exist; correct the URI"
            ) from None
        raise
    folder = _get_cache_folder(address, source.version)
    name = PurePosixPath(address.key).name
    with convert_cache_errors(folder, "DSREASON_CACHE"):
        return build_copy(folder, lambda draft: _fetch(source, draft / name)) / name


def fetch_folder(text: str, is_wanted: Callable[[str], bool]) -> Path:
    """Return a local copy of a folder, with only the objects for whose relative path `is_wanted` returns True.

    The errors are those of `fetch_file`.
    """
    address = read_address(text)
    objects = list_objects(address)
    chosen_objects = {name: source for name, source in sorted(objects.items()) if is_wanted(name)}
    if not chosen_objects:
        content = "usable files" if objects else "objects"
        raise DataError(f"{address}: no {content} exist below this URI; correct it")
    for name in chosen_objects:
        if (
            not PurePosixPath(name).parts
            or name != str(PurePosixPath(name))
            or {"..", "/"} & {*PurePosixPath(name).parts}
        ):
            raise DataError(f"{address}: the object {name!r} would be written outside its folder; rename it")
    folder = _get_cache_folder(
        address, "\n".join(f"{name} {source.version}" for name, source in chosen_objects.items())
    )
    with convert_cache_errors(folder, "DSREASON_CACHE"):
        return build_copy(folder, lambda draft: _fetch_all(address, chosen_objects, draft))


def check_room(place: str, sources: Iterable[S3Object]) -> None:
    """Raise StorageError if the objects that are not yet cached do not fit on the cache's disk."""
    missing = sum(source.size for source in sources if not _get_cache_folder(source.address, source.version).is_dir())
    folder = get_cache_dir()
    with convert_cache_errors(folder, "DSREASON_CACHE"):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if missing > free:
        raise StorageError(
            f"{place}: {missing / 1e9:.1f} GB must be fetched, but only {free / 1e9:.1f} GB are free in {folder}; free disk "
            "space, set DSREASON_CACHE to another folder, or choose a folder with fewer files"
        )


def _fetch_all(address: S3Address, objects: Mapping[str, S3Object], partial: Path) -> None:
    log.info("fetching %d files from %s", len(objects), address)
    with ThreadPool(PARALLEL) as threads:
        for _ in threads.imap(lambda item: _fetch(item[1], partial / item[0]), objects.items()):
            pass


def _get_cache_folder(address: S3Address, version: str) -> Path:
    key = hashlib.sha256(f"{address} {version}".encode()).hexdigest()[:24]
    return get_cache_dir() / "s3" / address.bucket / key


def _fetch(source: S3Object, file: Path) -> None:
    """Fetch the missing part of the file. A partial file from an earlier process is of the same version.

    A file completed in this way is compared with the object's ETag, if that is an MD5 hash, and fetched again if they differ.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    start = file.stat().st_size if file.exists() else 0
    if start > source.size:
        file.unlink()
        start = 0
    remaining = source.size - start
    free = shutil.disk_usage(file.parent).free
    if remaining > free:
        raise OSError(f"{source.address} needs {remaining} bytes, but only {free} are free")
    if source.size >= SHOWN_BYTES:
        log.info("fetching %s (%.1f GB)", source.address, source.size / 1e9)
    read_into(source, file)
    if start and has_other_md5(source, file):
        log.warning("%s: the part that an earlier process fetched is damaged; fetching the file again", source.address)
        file.unlink()
        read_into(source, file)


def has_other_md5(source: S3Object, file: Path) -> bool:
    """Return whether the object's ETag is an MD5 hash that differs from the file's. ETags of multipart uploads are not MD5."""
    etag = source.etag.strip('"')
    if not re.fullmatch("[0-9a-f]{32}", etag):
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, partial(hashlib.md5, usedforsecurity=False)).hexdigest() != etag
