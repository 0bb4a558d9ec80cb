"""Uploads to the Hugging Face Hub. The huggingface_hub library sends only the missing files, retries after transient errors,
and commits once all files have arrived."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from dsreason.checkpoints.checkpoint_folder import CARD
from dsreason.errors import StorageError
from dsreason.files.address import HubAddress
from dsreason.files.deadline import run_with_limit
from dsreason.files.disk import compute_sha256
from dsreason.files.hub import ADVICE, HUB_ERRORS, convert_hub_error
from dsreason.files.retries import run_with_retries
from dsreason.monitor.progress import Advance
from dsreason.secrets import quiet_libraries
from dsreason.storage.package import Package, Sent

log = logging.getLogger(__name__)

CHECK_LIMIT_S = 300.0
"""Time limit in seconds for the requests that check whether the token has write access to the repository."""
ATTEMPTS = 2
"""Maximum number of attempts per upload. Within an attempt, the library also retries each request."""


@dataclass(frozen=True)
class HubStorage:
    """A repository on the Hub. An upload creates it as a private repository if it does not exist."""

    address: HubAddress

    def check(self, *, create: bool) -> None:
        """Check that the token may commit, without committing a file. The Hub checks the permission before it accepts data.

        If the repository or branch does not exist and must not be created, check the token's account instead.
        """
        with convert_hub_errors(self.address):
            run_with_limit(CHECK_LIMIT_S, lambda: self._check(create=create))

    def _check(self, *, create: bool) -> None:
        try:
            with convert_hub_errors(self.address):
                api = self._open(create=create)
                probe = CommitOperationAdd(path_in_repo=".dsreason-write-test", path_or_fileobj=b"test")
                api.preupload_lfs_files(self.address.repo, [probe], revision=self.address.revision)
        except StorageError as error:
            if create or error.status != 404:
                raise
            self._check_account()

    def _check_account(self) -> None:
        with convert_hub_errors(self.address):
            account = self._open(create=False).whoami()
        owner, name = self.address.repo.partition("/")[0], account["name"]
        if owner.lower() not in {
            name.lower(),
            *(organization["name"].lower() for organization in account.get("orgs", [])),
        }:
            raise StorageError(
                f"{self.address}: the token in HF_TOKEN belongs to {name}, who is not a member of {owner}; correct the name, "
                f"or use a token with access to {owner}",
                status=403,
            )
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise StorageError(f"{self.address}: {ADVICE[403]}", status=403)

    def upload(self, package: Package, advance: Advance) -> Sent:
        def once() -> None:
            with convert_hub_errors(self.address):
                self._upload(package)

        run_with_retries(once, ATTEMPTS)
        advance(package.num_bytes)
        return Sent(len(package.files), package.num_bytes)

    def _upload(self, package: Package) -> None:
        api = self._open(create=True)
        package = self._drop_card(api, package)
        sums = {name: compute_sha256(package.folder / name) for name in package.files}
        api.upload_folder(
            repo_id=self.address.repo,
            folder_path=package.folder,
            path_in_repo=self.address.folder,
            revision=self.address.revision,
            allow_patterns=[glob.escape(name) for name in package.files],
            commit_message=f"Upload {package.name}",
        )
        api.upload_file(
            repo_id=self.address.repo,
            path_or_fileobj=package.build_marker(sums),
            path_in_repo=f"{self.address.folder}/{package.marker}".lstrip("/"),
            revision=self.address.revision,
            commit_message=f"Upload of {package.name} is complete",
        )

    def _drop_card(self, api: HfApi, package: Package) -> Package:
        """Drop the model card from the package if the repository already has one, which its owner may have edited."""
        path = f"{self.address.folder}/{CARD}".lstrip("/")
        if CARD not in package.files or not api.file_exists(self.address.repo, path, revision=self.address.revision):
            return package
        log.warning("%s: the existing %s is kept; delete it to upload the new one", self.address, CARD)
        return replace(package, files={name: size for name, size in package.files.items() if name != CARD})

    def _open(self, *, create: bool) -> HfApi:
        if get_token() is None:
            raise StorageError(
                f"{self.address}: no token is set; set HF_TOKEN to a token with write permission", status=401
            )
        quiet_libraries()
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        if create:
            api.create_repo(self.address.repo, private=True, exist_ok=True)
        if create and self.address.revision is not None:
            api.create_branch(self.address.repo, branch=self.address.revision, exist_ok=True)
        return api


@contextmanager
def convert_hub_errors(address: HubAddress) -> Iterator[None]:
    """Convert the library's errors to a StorageError. The original is not chained, because it may contain signed URLs."""
    try:
        yield
    except HUB_ERRORS as error:
        raise convert_hub_error(error, str(address)) from None
