"""Storage that checkpoints and exports are uploaded to: S3 buckets, and repositories on the Hugging Face Hub.

An upload is complete when its marker is there, which is sent last: a checkpoint's `COMPLETE`, else `UPLOADED.json` with
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
    """Both methods raise StorageError, which names the place and the server's answer."""

    def check(self, *, create: bool) -> None:
        """Write something tiny, and remove it. A repository that does not exist is made only with `create`."""

    def upload(self, package: Package, advance: Advance) -> Sent: ...


def open_storage(target: UploadAddress) -> Storage:
    """No request is made yet."""
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
        create: make a repository that does not exist.
        tolerate_outage: only log what may pass on another try, such as a server that does not answer.
    """
    try:
        open_storage(read_target(target, option)).check(create=create)
    except StorageError as error:
        if not (tolerate_outage and error.transient):
            raise ConfigError(f"{option}: {error}") from None
        log.warning("%s: %s; training goes on, and uploads are tried when there is something to upload", option, error)


def upload(package: Package, target: UploadAddress, advance: Advance = lambda count: None) -> Sent:
    """Upload a checkpoint or an export so that its files lie right below `target`.

    Raises:
        StorageError: what storage refused, or a file that cannot be read. What has arrived stays there, another call
            sends the rest.
    """
    try:
        return open_storage(target).upload(package, advance)
    except OSError as error:
        raise StorageError(f"{package.folder}: cannot be read: {error}") from error


def place_in(target: UploadAddress, name: str) -> UploadAddress:
    """Where the folder `name` of a run (`checkpoints/step_4`, `export/final`) goes.

    The final export is what a repository on the Hub is loaded by, so it goes to the top of it.
    """
    return target if isinstance(target, HubAddress) and name == f"{EXPORTS}/final" else target / name
