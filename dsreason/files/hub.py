"""Downloads with huggingface_hub, integrity checks on its cache (which it lacks), and its errors with advice for the user."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import get_token, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dsreason.errors import DataError, StorageError
from dsreason.files.cache import FileRecord, get_cache_dir, read_record, record_files, write_record
from dsreason.secrets import hide_secrets

log = logging.getLogger(__name__)

HUB_ERRORS = (HTTPError, OSError, ValueError, RuntimeError, KeyError, TypeError)
"""Errors that huggingface_hub raises. HTTPError comes from httpx or httpx2, depending on the version of huggingface_hub. If the
server is not a Hub, its responses cause KeyError, TypeError or RecursionError (a RuntimeError)."""
ADVICE = {
    401: "the token in HF_TOKEN is missing, invalid or expired; create one with write permission in your account settings",
    403: "the token in HF_TOKEN has no write access; grant it write permission, and grant your account access",
    404: "the repository or branch does not exist, or the token in HF_TOKEN cannot access it; correct the name",
    429: "there were too many requests; try again later",
}


SHA1 = re.compile("[0-9a-f]{40}")


def get_hub_url() -> str:
    """Return the URL of the Hub, or of the mirror set in `HF_ENDPOINT`."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def convert_hub_error(error: Exception, where: str, *, page: str = "", revision: str | None = None) -> StorageError:
    """Convert one of `HUB_ERRORS` to a StorageError.

    The original message may contain signed URLs, so raise the result `from None` if others can see the traceback.

    Args:
        where: what the message is about, such as the repository; it comes first.
        page: for a read request, the URL of the repository's page on the Hub; empty for a write request.
        revision: revision that was requested, for the message.
    """
    if isinstance(error, OfflineModeIsEnabled):
        return StorageError(f"{where}: HF_HUB_OFFLINE is set, so the Hub is not contacted; unset it")
    if isinstance(error, LocalEntryNotFoundError):
        return StorageError(f"{where}: is not in the Hub cache, and the Hub cannot be reached; check the connection")
    if isinstance(error, HFValidationError):
        return StorageError(f"{where}: is not a valid repository name ({error}); use owner/name")
    if isinstance(error, (KeyError, TypeError, RecursionError)):
        text = get_first_line(f"{type(error).__name__}: {error}")
        return StorageError(f"{where}: the server does not respond like a Hub ({text}); check HF_ENDPOINT")
    if not isinstance(error, HfHubHTTPError):
        text = f"{where}: {get_first_line(str(error)) or type(error).__name__}; check the connection and the disk"
        return StorageError(text, transient=not isinstance(error, ValueError))
    status, message = error.response.status_code, get_first_line(error.server_message or "")
    if page and (advice := get_reading_advice(error, page, revision)):
        return StorageError(f"{where}: {advice}", status=status)
    transient = status == 429 or status >= 500
    advice = ADVICE.get(
        status, "the server failed; try again later" if transient else "the request was refused; check the name"
    )
    answer = f"the Hub responds with {status}" + (f" ({message})" if message else "")
    return StorageError(f"{where}: {answer}: {advice}", status=status, transient=transient)


def get_reading_advice(error: HfHubHTTPError, page: str, revision: str | None) -> str:
    token = "the token in HF_TOKEN" if get_token() else "HF_TOKEN (currently not set)"
    if isinstance(error, GatedRepoError):
        state = "the current one has no access" if get_token() else "it is not set"
        return f"is gated; accept its terms on {page}, and set HF_TOKEN to a token of that account ({state})"
    if isinstance(error, RepositoryNotFoundError):
        return f"does not exist on the Hub, or is private; check the name and {token}"
    if isinstance(error, RevisionNotFoundError):
        return f"has no revision {revision!r}; see {page}/tree/main for branches and commits"
    status = error.response.status_code
    return f"the Hub responds with {status}; check {token}" if status in (401, 403) else ""


def get_first_line(text: str) -> str:
    return hide_secrets(text.strip().partition("\n")[0])


@contextmanager
def convert_dataset_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's errors about a data set to a DataError with advice."""
    try:
        yield
    except HUB_ERRORS as error:
        problem = convert_hub_error(error, repo, page=f"{get_hub_url()}/datasets/{repo}", revision=revision)
        advice = ", then run the same command again to continue" if problem.transient else ""
        raise DataError(f"{problem}{advice}") from error


def fetch_snapshot(repo: str, **options: Any) -> Path:
    """Call `snapshot_download` and return the folder. Files that have been damaged in the cache are downloaded again.

    A damaged file stays until its replacement is complete.

    Raises:
        StorageError: a file is still damaged after the second download, or could not be downloaded.
    """
    folder = Path(snapshot_download(repo, **options))
    if damaged := find_damaged_files(folder):
        others = f" (as are {len(damaged) - 1} others)" if len(damaged) > 1 else ""
        log.warning("the cached copy of %s is damaged%s; downloading it again", next(iter(damaged)), others)
        names = [glob.escape(file.relative_to(folder).as_posix()) for file in damaged]
        again = {"revision": folder.name, "allow_patterns": names, "force_download": True}
        snapshot_download(repo, **{**options, **again})  # returns the cached folder if the Hub cannot be reached
        for file, record in find_damaged_files(folder, damaged).items():
            if record == damaged.get(file):
                raise StorageError(
                    f"the cached copy of {file} is damaged and cannot be downloaded again; check the connection and "
                    "HF_HUB_OFFLINE"
                )
            raise StorageError(f"{file} is still damaged after a second download; check the disk and the connection")
    return folder


def find_damaged_files(snapshot: Path, earlier: Mapping[Path, FileRecord] | None = None) -> dict[Path, FileRecord]:
    """Return a snapshot's damaged files, with their records. A file is damaged if its content does not match its blob's name,
    which is a hash.

    A file is read only if its size or times have changed since it was last read.

    Args:
        earlier: files that an earlier call returned and that have been downloaded again. Such a file is not damaged if its
            content has not changed and its blob's name may be a different kind of hash.
    """
    key = hashlib.sha256(str(snapshot.absolute()).encode()).hexdigest()[:24]
    record = get_cache_dir() / "hub" / f"{key}.json"
    blobs = {locate_blob(file): file for file in snapshot.rglob("*") if file.is_symlink() and file.is_file()}
    known = read_record(record) or {}
    new = [blob for blob in blobs if blob not in known or not known[blob].matches(os.stat(blob))]
    read = record_files(new)
    damaged = [
        blob
        for blob in new
        if not (
            fits_name(Path(blob), read[blob].sha256)
            or (blob in known and known[blob].sha256 == read[blob].sha256)
            or is_same_download(Path(blob), read[blob], (earlier or {}).get(blobs[blob]))
        )
    ]
    sound = {blob: entry for blob, entry in (known | read).items() if blob in blobs and blob not in damaged}
    if new:
        with suppress(OSError):  # without a record, the files are read again
            write_record(record, sound)
    return {blobs[blob]: read[blob] for blob in damaged}


def locate_blob(link: Path) -> str:
    """Return the path of a file's blob, without resolving it: it may be a link to a store that several repositories share."""
    return os.path.normpath(os.path.join(os.path.realpath(link.parent), os.readlink(link)))


def fits_name(blob: Path, sha256: str) -> bool:
    """Return whether a blob's name is its hash: SHA-256 for large files, and Git's SHA-1 or plain SHA-1 for other files."""
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        return blob.name == sha256
    if not SHA1.fullmatch(blob.name):
        return True  # servers other than the Hub may use any ETag
    content = blob.read_bytes()
    prefixes = (b"blob %d\0" % len(content), b"")
    return blob.name in [hashlib.sha1(prefix + content, usedforsecurity=False).hexdigest() for prefix in prefixes]


def is_same_download(blob: Path, record: FileRecord, earlier: FileRecord | None) -> bool:
    """Return whether two downloads of a file have the same content, and the blob's name may be a hash unknown to `fits_name`."""
    if earlier is None or record == earlier:  # there was no second download
        return False
    return record.sha256 == earlier.sha256 and SHA1.fullmatch(blob.name) is not None
