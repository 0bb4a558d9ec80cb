"""Uploads to S3. Large files are sent in parts, everything is verified by ETag, and files that already exist are skipped."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from dsreason.errors import StorageError
from dsreason.files.address import S3Address
from dsreason.files.disk import compute_sha256
from dsreason.files.s3 import Answer, request
from dsreason.monitor.progress import Advance
from dsreason.storage.package import Package, Sent

PART_BYTES = 16 * 1024**2
MAX_PARTS = 10_000
PARALLEL = 8
"""Maximum number of parts that are sent at the same time, and therefore held in host memory."""
MD5 = re.compile(r"[0-9a-f]{32}(-\d+)?")
SHA256 = "sha256"
"""Metadata key for an object's SHA-256, by which later uploads recognise files that they can skip."""


@dataclass(frozen=True)
class S3Storage:
    address: S3Address

    def check(self, *, create: bool) -> None:
        probe = self.address / f".dsreason-write-test-{uuid.uuid4().hex}"
        request("put_object", probe, attempts=2, Key=probe.key, Body=b"test")
        request("head_object", probe, attempts=2, Key=probe.key)
        request("delete_object", probe, attempts=2, Key=probe.key)

    def upload(self, package: Package, advance: Advance) -> Sent:
        sums = {name: compute_sha256(package.folder / name) for name in package.files}
        missing = [name for name, size in package.files.items() if not self._has(name, size, sums[name])]
        advance(package.num_bytes - sum(package.files[name] for name in missing))
        marker = self.address / package.marker
        # An existing marker belongs to the old content, which is about to be replaced.
        if missing and self._get_head(package.marker) is not None:
            request("delete_object", marker, Key=marker.key)
        for name in missing:
            self._send(package.folder / name, name, sums[name], advance)
        self._check_not_replaced(sums)
        content = package.build_marker(sums)
        request(
            "put_object",
            marker,
            check=make_etag_check(marker, compute_md5(content).hexdigest()),
            Key=marker.key,
            Body=content,
        )
        return Sent(len(missing), sum(package.files[name] for name in missing))

    def _has(self, name: str, size: int, sha256: str) -> bool:
        head = self._get_head(name)
        return head is not None and head["ContentLength"] == size and head["Metadata"].get(SHA256) == sha256

    def _check_not_replaced(self, sums: Mapping[str, str]) -> None:
        """Raise StorageError if another upload to the same target has replaced a file, so that the contents are mixed."""
        for name, sha256 in sums.items():
            head = self._get_head(name)
            if head is not None and head["Metadata"].get(SHA256, sha256) != sha256:
                raise StorageError(
                    f"{self.address / name}: was replaced by another upload to the same target; upload again once that has ended"
                )

    def _get_head(self, name: str) -> Answer | None:
        address = self.address / name
        try:
            return request("head_object", address, Key=address.key)
        except StorageError as error:
            if error.status in (403, 404):  # without permission to list the bucket, S3 returns 403 for a missing object
                return None
            raise

    def _send(self, file: Path, name: str, sha256: str, advance: Advance) -> None:
        address, size = self.address / name, file.stat().st_size
        facts: dict[str, Any] = {"Key": address.key, "Metadata": {SHA256: sha256}}
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        if size <= part_bytes:
            content = file.read_bytes()
            etag = compute_md5(content).hexdigest()
            request("put_object", address, check=make_etag_check(address, etag), Body=content, **facts)
            advance(size)
        else:
            etag = send_parts(file, address, facts, part_bytes, advance)
        request("head_object", address, check=make_file_check(address, size, etag), Key=address.key)


def send_parts(file: Path, address: S3Address, facts: dict[str, Any], part_bytes: int, advance: Advance) -> str:
    """Upload a file in parts, and return the ETag that S3 should compute for the object. On failure, delete all parts."""
    size = file.stat().st_size
    upload = {"Key": address.key, "UploadId": request("create_multipart_upload", address, **facts)["UploadId"]}

    def send(number: int) -> tuple[str, bytes]:
        with file.open("rb") as source:
            source.seek((number - 1) * part_bytes)
            content = source.read(part_bytes)
        digest = compute_md5(content)
        check = make_etag_check(address, digest.hexdigest())
        answer = request("upload_part", address, check=check, PartNumber=number, Body=content, **upload)
        advance(len(content))
        return answer["ETag"], digest.digest()

    count = -(-size // part_bytes)
    try:
        # The threads are daemons, which do not keep the process from exiting.
        with ThreadPool(min(PARALLEL, count)) as threads:
            sent_parts = list(threads.imap(send, range(1, count + 1)))
        parts = [{"PartNumber": number, "ETag": etag} for number, (etag, _) in enumerate(sent_parts, start=1)]
        try:
            request("complete_multipart_upload", address, MultipartUpload={"Parts": parts}, **upload)
        except StorageError as error:
            # 404 means that an earlier attempt succeeded but its response was lost. The caller checks the object.
            if error.status != 404:
                raise
    except BaseException:
        with suppress(StorageError):
            request("abort_multipart_upload", address, attempts=1, **upload)
        raise
    return f"{compute_md5(b''.join(digest for _, digest in sent_parts)).hexdigest()}-{count}"


def make_file_check(address: S3Address, size: int, etag: str) -> Callable[[Answer], None]:
    def check(answer: Answer) -> None:
        if answer["ContentLength"] != size:
            raise StorageError(
                f"{address}: has {answer['ContentLength']} bytes, but the file has {size}; upload it again"
            )
        make_etag_check(address, etag)(answer)

    return check


def make_etag_check(address: S3Address, expected: str) -> Callable[[Answer], None]:
    """Return a function that raises StorageError if a response's ETag shows that S3 has received different bytes.

    An ETag is compared only if it is an MD5 hash, which it is not with KMS or customer keys and on some S3-compatible servers.
    """

    def check(answer: Answer) -> None:
        etag = answer["ETag"].strip('"')
        encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in answer
        comparable = MD5.fullmatch(etag) and ("-" in etag) == ("-" in expected)
        if comparable and not encrypted and etag != expected:
            raise StorageError(
                f"{address}: was corrupted in transit (its ETag is {etag}, but {expected} was expected)", transient=True
            )

    return check


def compute_md5(content: bytes) -> Any:
    return hashlib.md5(content, usedforsecurity=False)
