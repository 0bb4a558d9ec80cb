"""Storage for uploaded checkpoints, exports and logs: S3 buckets and repositories on the Hugging Face Hub.

An upload's marker is uploaded last, so an upload that has its marker is complete. For a checkpoint, the marker is `COMPLETE`;
for any other upload, it is `UPLOADED.json`, which lists the size and SHA-256 of every file.
"""

from __future__ import annotations

import logging
from typing import Protocol

from dsreason.errors import ConfigError, StorageError
from dsreason.files.address import HubAddress, S3Address, UploadAddress, parse_target
from dsreason.monitor.progress import Advance
from dsreason.storage.package import EXPORTS, Package, Sent

log = logging.getLogger(__name__)


class Storage(Protocol):
    """A storage backend. On failure, both methods raise a StorageError that contains the target and the server's response."""

    def check(self, *, create: bool) -> None:
        """Check that the target is writable, without leaving a file there. If `create` is set, create a missing repository."""

    def upload(self, package: Package, advance: Advance) -> Sent: ...


def open_storage(target: UploadAddress) -> Storage:
    """Return the storage backend for a target. No request is sent."""
    if isinstance(target, S3Address):
        from dsreason.storage.storage_s3 import S3Storage

        return S3Storage(target)
    from dsreason.storage.storage_hub import HubStorage

    return HubStorage(target)


def read_target(text: str, option: str) -> UploadAddress:
    try:
        return parse_target(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def check_target(
    target: str, option: str = "checkpoint.upload", *, create: bool = False, tolerate_outage: bool = False
) -> None:
    """Raise ConfigError if `target` currently cannot be reached or written to.

    Args:
        create: whether to create a repository that does not exist.
        tolerate_outage: whether to log transient errors, such as a server that does not respond, instead of raising them.
    """
    try:
        open_storage(read_target(target, option)).check(create=create)
    except StorageError as error:
        if not (tolerate_outage and error.transient):
            raise ConfigError(f"{option}: {error}") from None
        log.warning("%s: %s; training continues, and the first upload will retry", option, error)


def upload(package: Package, target: UploadAddress, advance: Advance = lambda count: None) -> Sent:
    """Upload a package's files to `target`, without an additional folder level.

    Raises:
        StorageError: the upload failed, or a file cannot be read. Files that have already been uploaded are kept, so another
            call uploads only the remaining files.
    """
    try:
        return open_storage(target).upload(package, advance)
    except OSError as error:
        raise StorageError(f"{package.folder}: cannot be read: {error}") from error


def get_folder_target(target: UploadAddress, name: str) -> UploadAddress:
    """Return the target for a run's folder `name`, such as `checkpoints/step_4` or `export/final`.

    On the Hub, the final export goes to `target` itself, because models are loaded from the top level of a repository.
    """
    return target if isinstance(target, HubAddress) and name == f"{EXPORTS}/final" else target / name
