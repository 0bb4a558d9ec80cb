"""Storage for uploads of checkpoints and exports: S3 buckets, and repositories on the Hugging Face Hub.

An upload is complete when its marker exists, which is sent last: a checkpoint's `COMPLETE`, else `UPLOADED.json` with
the size and SHA-256 of every file.
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
    """A storage backend. Both methods raise StorageError, which names the target and the server's response."""

    def check(self, *, create: bool) -> None:
        """Write something tiny, and remove it. A missing repository is created only with `create`."""

    def upload(self, package: Package, advance: Advance) -> Sent: ...


def open_storage(target: UploadAddress) -> Storage:
    """Return the storage of a target, without making a request."""
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
    """Raise ConfigError unless `target` can be reached and written to now.

    Args:
        create: create a repository that does not exist.
        tolerate_outage: only log transient errors, such as a server that does not respond.
    """
    try:
        open_storage(read_target(target, option)).check(create=create)
    except StorageError as error:
        if not (tolerate_outage and error.transient):
            raise ConfigError(f"{option}: {error}") from None
        log.warning("%s: %s; training continues, and the first upload will try again", option, error)


def upload(package: Package, target: UploadAddress, advance: Advance = lambda count: None) -> Sent:
    """Upload a checkpoint or an export so that its files are directly below `target`.

    Raises:
        StorageError: the storage refuses, or a file cannot be read. Uploaded files are kept, and another call sends the
            remaining ones.
    """
    try:
        return open_storage(target).upload(package, advance)
    except OSError as error:
        raise StorageError(f"{package.folder}: cannot be read: {error}") from error


def get_folder_target(target: UploadAddress, name: str) -> UploadAddress:
    """Return the target of the folder `name` of a run (`checkpoints/step_4`, `export/final`).

    The final export goes to the top of a repository on the Hub, from where models are loaded.
    """
    return target if isinstance(target, HubAddress) and name == f"{EXPORTS}/final" else target / name
