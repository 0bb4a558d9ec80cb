"""Storage URLs (`s3://bucket/prefix`, `hub:user/name`), and functions that parse them without network access."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from dsreason.secrets import mask_credentials

S3 = "s3://"
HUB = "hub:"
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
REPOSITORY = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<folder>[^@]+))?(?:@(?P<revision>[\w./-]+))?")
TOKEN = re.compile(r"hf_\w+")


@dataclass(frozen=True)
class S3Address:
    """URL of an S3 object, of a folder (all objects whose keys start with `key` and a slash), or of a bucket (`key` is empty)."""

    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{S3}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> S3Address:
        return replace(self, key=f"{self.key}/{name}".lstrip("/"))

    @property
    def on_branch(self) -> S3Address:
        """This URL unchanged, because S3 has no branches; see `HubAddress.on_branch`."""
        return self

    @property
    def parent(self) -> S3Address:
        return replace(self, key=self.key.rpartition("/")[0])


@dataclass(frozen=True)
class HubAddress:
    """A model repository on the Hugging Face Hub, or a folder in one. `revision` is a branch; None means main."""

    repo: str
    folder: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repo}/{self.folder}".rstrip("/") + revision

    @property
    def on_branch(self) -> HubAddress:
        """This URL with an explicit branch, so that two URLs for the same target compare equal."""
        return replace(self, revision=self.revision or "main")

    def __truediv__(self, name: str) -> HubAddress:
        return replace(self, folder=f"{self.folder}/{name}".lstrip("/"))


def is_s3(text: str) -> bool:
    return text.startswith(S3)


def parse_s3(text: str) -> S3Address:
    """Parse an S3 URL. Raise ValueError if it is invalid; the message contains no credentials."""
    bucket, _, key = text.removeprefix(S3).partition("/")
    if BUCKET.fullmatch(bucket) is None:
        if "@" in text or ":" in text.removeprefix(S3):
            raise ValueError(
                "s3://…@…: an S3 URI must not contain keys; write s3://bucket/prefix, and set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            )
        raise ValueError(
            f"{text}: {bucket!r} is not a valid bucket name (3 to 63 lowercase letters, digits, dots and hyphens); "
            "write s3://bucket/prefix"
        )
    if "?" in key:
        raise ValueError(
            f"{S3}{bucket}/{key.partition('?')[0]}?…: an S3 URI has no query; remove '?' and everything after it"
        )
    return S3Address(bucket, _check_path(key.strip("/"), f"{S3}{bucket}/{key}"))


UploadAddress = S3Address | HubAddress
"""URL of an upload target."""


def parse_target(text: str) -> UploadAddress:
    """Parse an upload target; raise ValueError if it is invalid."""
    if is_s3(text):
        return parse_s3(text)
    match = REPOSITORY.fullmatch(text.removeprefix(HUB).rstrip("/"))
    if not text.startswith(HUB) or match is None:
        shown_text = TOKEN.sub("hf_…", mask_credentials(text))
        raise ValueError(
            f"{shown_text!r} is not a valid upload target; use s3://bucket/prefix or hub:user/name[/folder][@branch]"
        )
    if TOKEN.search(text):
        raise ValueError("hub:…: an upload target must not contain a token; set HF_TOKEN instead")
    return HubAddress(match["repo"], _check_path((match["folder"] or "").strip("/"), text), match["revision"])


def _check_path(path: str, text: str) -> str:
    """Return the path unchanged; raise ValueError if it is not safe to append to a local folder."""
    if path and (path != str(PurePosixPath(path)) or ".." in path.split("/")):
        raise ValueError(f"{text}: the path must not contain '.', '..' or an empty component; remove it")
    return path
