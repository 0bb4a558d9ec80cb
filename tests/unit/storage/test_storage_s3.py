"""S3 requests and their order, with a stand-in that keeps objects in a dictionary.

Tests with a real server are in tests/integration.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dsreason.errors import StorageError
from dsreason.files import retries
from dsreason.files.address import S3Address
from dsreason.files.retries import run_with_retries
from dsreason.storage import storage_s3
from dsreason.storage.package import Package, open_package
from dsreason.storage.storage_s3 import S3Storage
from tests.unit.checkpoints.made_folders import make_checkpoint

PLACE = S3Address("bucket", "run/step_4")


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class Bucket:
    """A stand-in for S3 that records each modifying call as (method, object name relative to `PLACE`)."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str], str]] = {}
        """Content, metadata and ETag of each object."""
        self.calls: list[tuple[str, str]] = []
        self.parts: dict[int, bytes] = {}
        self.broken_part: int | None = None

    def request(self, method: str, address: S3Address, *, check: Any = lambda answer: None, **given: Any) -> Any:
        attempts = given.pop("attempts", None)
        name = given.pop("Key").removeprefix(f"{PLACE.key}/")
        if method != "head_object":
            self.calls.append((method, name))

        def once() -> Any:
            answer = getattr(self, method)(name, **given)
            check(answer)
            return answer

        return run_with_retries(once, attempts)

    def put_object(self, name: str, Body: bytes, Metadata: dict[str, str] | None = None) -> dict[str, str]:
        self.objects[name] = (Body, Metadata or {}, md5(Body))
        return {"ETag": f'"{md5(Body)}"'}

    def head_object(self, name: str) -> dict[str, Any]:
        if name not in self.objects:
            raise StorageError(f"{name}: 404", status=404)
        content, metadata, etag = self.objects[name]
        return {"ContentLength": len(content), "Metadata": metadata, "ETag": f'"{etag}"'}

    def delete_object(self, name: str) -> dict[str, str]:
        self.objects.pop(name, None)
        return {}

    def create_multipart_upload(self, name: str, Metadata: dict[str, str]) -> dict[str, str]:
        self.metadata = Metadata
        return {"UploadId": "1"}

    def upload_part(self, name: str, PartNumber: int, Body: bytes, UploadId: str) -> dict[str, str]:
        if PartNumber == self.broken_part:
            raise StorageError(f"{name}: part {PartNumber} is refused")
        self.parts[PartNumber] = Body
        return {"ETag": f'"{md5(Body)}"'}

    def complete_multipart_upload(self, name: str, MultipartUpload: Any, UploadId: str) -> dict[str, str]:
        numbers = [part["PartNumber"] for part in MultipartUpload["Parts"]]
        assert [part["ETag"].strip('"') for part in MultipartUpload["Parts"]] == [md5(self.parts[n]) for n in numbers]
        digests = b"".join(hashlib.md5(self.parts[n], usedforsecurity=False).digest() for n in numbers)
        content = b"".join(self.parts[n] for n in numbers)
        self.objects[name] = (content, self.metadata, f"{md5(digests)}-{len(numbers)}")
        return {}

    def abort_multipart_upload(self, name: str, UploadId: str) -> dict[str, str]:
        self.parts = {}
        return {}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket()
    monkeypatch.setattr(storage_s3, "request", made.request)
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: None)
    return made


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return open_package(make_checkpoint(tmp_path / "checkpoints" / "step_4"))


def test_marker_is_sent_after_all_files(bucket: Bucket, package: Package) -> None:
    done: list[int] = []
    sent = S3Storage(PLACE).upload(package, done.append)
    assert bucket.calls == [("put_object", name) for name in (*package.files, "COMPLETE")]
    assert (sent.files, sent.num_bytes, sum(done)) == (2, 9, 9)


def test_unchanged_files_are_not_uploaded_again(bucket: Bucket, package: Package) -> None:
    S3Storage(PLACE).upload(package, lambda count: None)
    bucket.calls.clear()
    done: list[int] = []
    sent = S3Storage(PLACE).upload(package, done.append)
    assert bucket.calls == [("put_object", "COMPLETE")]
    assert (sent.files, sent.num_bytes, sum(done)) == (0, 0, 9)


def test_changed_file_is_replaced_with_marker_removed(bucket: Bucket, package: Package) -> None:
    S3Storage(PLACE).upload(package, lambda count: None)
    bucket.calls.clear()
    file = package.folder / "weights.pt"
    file.write_bytes(bytes(reversed(file.read_bytes())))
    assert S3Storage(PLACE).upload(open_package(package.folder), lambda count: None).files == 1
    assert bucket.calls == [("delete_object", "COMPLETE"), ("put_object", "weights.pt"), ("put_object", "COMPLETE")]
    assert bucket.objects["weights.pt"][0] == file.read_bytes()


def test_mixture_of_two_uploads_gets_no_marker(bucket: Bucket, package: Package) -> None:
    def overwrite(count: int) -> None:  # as another upload does between the first and the last file
        if count == package.files["weights.pt"]:
            bucket.put_object("trainer_state.json", b"changed", {"sha256": "of the other"})

    with pytest.raises(StorageError, match=r"trainer_state\.json: was replaced by another upload to the same target"):
        S3Storage(PLACE).upload(package, overwrite)
    assert "COMPLETE" not in bucket.objects


def test_parts_of_large_file_keep_their_order(
    bucket: Bucket, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_s3, "PART_BYTES", 2)
    content, send, last_is_there = (package.folder / "weights.pt").read_bytes(), bucket.upload_part, Event()

    def send_the_first_after_the_last(name: str, PartNumber: int, **given: Any) -> dict[str, str]:
        assert PartNumber > 1 or last_is_there.wait(30)
        answer = send(name, PartNumber, **given)
        if PartNumber == 4:
            last_is_there.set()
        return answer

    monkeypatch.setattr(bucket, "upload_part", send_the_first_after_the_last)
    S3Storage(PLACE).upload(package, lambda count: None)
    assert bucket.parts == {1: content[:2], 2: content[2:4], 3: content[4:6], 4: content[6:]}
    assert bucket.objects["weights.pt"][0] == content


def test_parts_grow_to_respect_the_maximum(bucket: Bucket, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_s3, "PART_BYTES", 2)
    monkeypatch.setattr(storage_s3, "MAX_PARTS", 3)
    S3Storage(PLACE).upload(package, lambda count: None)
    assert [len(bucket.parts[number]) for number in (1, 2, 3)] == [3, 3, 1]  # of 7 bytes


def test_failed_upload_leaves_no_parts_or_marker(
    bucket: Bucket, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_s3, "PART_BYTES", 2)
    bucket.broken_part = 3
    with pytest.raises(StorageError, match="part 3 is refused"):
        S3Storage(PLACE).upload(package, lambda count: None)
    assert bucket.calls[-1] == ("abort_multipart_upload", "weights.pt")
    assert "COMPLETE" not in bucket.objects


def test_corrupted_upload_is_reported(bucket: Bucket, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_s3, "PART_BYTES", 2)
    head = bucket.head_object

    def damaged(name: str) -> dict[str, Any]:
        return head(name) | ({"ETag": f'"{"0" * 32}-4"'} if name == "weights.pt" else {})

    monkeypatch.setattr(bucket, "head_object", damaged)
    with pytest.raises(StorageError, match=r"weights\.pt: was corrupted in transit"):
        S3Storage(PLACE).upload(package, lambda count: None)


def test_stale_etag_is_checked_again(bucket: Bucket, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    head, stale = bucket.head_object, ["0" * 32]

    def first_stale(name: str) -> dict[str, Any]:
        answer = head(name)
        return answer | ({"ETag": f'"{stale.pop()}"'} if name == "weights.pt" and stale else {})

    monkeypatch.setattr(bucket, "head_object", first_stale)
    S3Storage(PLACE).upload(package, lambda count: None)
    assert not stale
    assert bucket.calls[-1] == ("put_object", "COMPLETE")
