"""Reads from S3 with a stand-in for boto3's client. Tests with a real server: tests/integration/test_storage.py."""

from __future__ import annotations

from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dsreason.errors import StorageError
from dsreason.files import retries, s3
from dsreason.files.address import S3Address

CONTENT = b"0123456789"
WRITTEN = datetime(2026, 1, 31, tzinfo=UTC)


class Client:
    """A client for one object that returns at most `given` bytes per request."""

    def __init__(self) -> None:
        self.etag, self.ranges, self.listed = '"a"', [], []
        self.given = [len(CONTENT)] * 9

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        return {"ContentLength": len(CONTENT), "ETag": self.etag, "LastModified": WRITTEN}

    def get_object(self, Bucket: str, Key: str, Range: str, IfMatch: str | None = None) -> dict[str, Any]:
        self.ranges.append(Range)
        if IfMatch not in (None, self.etag):
            raise ClientError({"Error": {"Code": "412"}, "ResponseMetadata": {"HTTPStatusCode": 412}}, "GetObject")
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        return {"Body": BytesIO(CONTENT[first : last + 1][: self.given.pop(0)])}

    def list_objects_v2(self, Bucket: str, Prefix: str, ContinuationToken: str = "0") -> dict[str, Any]:
        self.listed.append(ContinuationToken)
        if ContinuationToken == "1" and self.listed.count("1") == 1:
            raise ClientError(
                {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "ListObjectsV2"
            )
        names = {"0": ["a.mp4", "sub/"], "1": ["sub/b.mp4"], "2": []}[ContinuationToken]
        entries = [{"Key": f"{Prefix}{name}", "Size": 1, "ETag": '"a"', "LastModified": WRITTEN} for name in names]
        if ContinuationToken == "2":
            return {"IsTruncated": False}  # an empty page at the end of a folder
        return {"Contents": entries, "IsTruncated": True, "NextContinuationToken": str(int(ContinuationToken) + 1)}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(s3, "connect", lambda: made)
    monkeypatch.setattr(s3, "READ_BYTES", 4)
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: None)
    return made


def test_listing_spans_pages_and_omits_folder_markers(client: Client) -> None:
    objects = s3.list_objects(S3Address("bucket", "clips"))
    assert {name: source.address.key for name, source in objects.items()} == {
        "a.mp4": "clips/a.mp4",
        "sub/b.mp4": "clips/sub/b.mp4",
    }


def test_only_rejected_page_is_requested_again(client: Client) -> None:
    s3.list_objects(S3Address("bucket", "clips"))
    assert client.listed == ["0", "1", "1", "2"]


def test_interrupted_fetch_resumes_at_last_byte(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT[:3])
    s3.read_into(s3.find_object(S3Address("bucket", "a")), tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert client.ranges == ["bytes=3-6", "bytes=7-9"]


def test_short_part_is_requested_again(client: Client, tmp_path: Path) -> None:
    client.given = [4, 2, 4, 4]
    s3.read_into(s3.find_object(S3Address("bucket", "a")), tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert client.ranges == ["bytes=0-3", "bytes=4-7", "bytes=4-7", "bytes=8-9"]


def test_object_replaced_during_read_is_rejected(client: Client, tmp_path: Path) -> None:
    source = s3.find_object(S3Address("bucket", "a"))
    client.etag = '"b"'
    with pytest.raises(StorageError, match="the object changed while it was being read"):
        s3.read_into(source, tmp_path / "a")
