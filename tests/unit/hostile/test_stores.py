"""Misbehaving S3 and Hub servers: clients raise an error in time, and read no more than they requested."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dsreason.errors import DataError, StorageError
from dsreason.files import deadline, retries, s3
from dsreason.files.address import S3Address
from dsreason.files.hub import convert_dataset_errors
from dsreason.files.s3 import S3Object
from dsreason.storage import storage_hub
from dsreason.storage.storage_hub import HubAddress, HubStorage
from dsreason.tools.datasets import hub, ranges
from dsreason.tools.datasets.hub import RemoteFile
from dsreason.tools.datasets.ranges import ServedFile, fetch_part
from tests.unit.hostile.server import (
    NEVER,
    PIECE,
    REDIRECTS,
    Behaviour,
    answer,
    content,
    drip,
    flood,
    head,
    misbehaving,
)

ADDRESS = S3Address("bucket", "key")
SECRET = "very-secret-token"
NAMES = (
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SESSION_TOKEN",
    "http_proxy",
    "HTTP_PROXY",
    "all_proxy",
    "ALL_PROXY",
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for module, name, value in (
        (s3, "REQUEST_LIMIT_S", 0.4),
        (s3, "SLOWEST", 1e12),
        (retries, "ATTEMPTS", 1),
        (hub, "OPEN_LIMIT", 0.4),
        (hub, "LIST_LIMIT", 0.4),
        (hub, "ATTEMPTS", 1),
        (ranges, "ATTEMPTS", 1),
        (storage_hub, "CHECK_LIMIT_S", 0.4),
        (deadline, "PACE_S", 0.3),
    ):
        monkeypatch.setattr(module, name, value)


def find(url: str, folder: Path) -> None:
    s3.find_object(ADDRESS)


def list_all(url: str, folder: Path) -> None:
    s3.list_objects(ADDRESS)


def read(url: str, folder: Path) -> None:
    s3.read_into(S3Object(ADDRESS, 9, '"tag"', "1"), folder / "copy")


def hub_list(url: str, folder: Path) -> None:
    hub.list_files("owner/name", None)


def hub_download(url: str, folder: Path) -> None:
    file = RemoteFile("clips.tar", 9, "0" * 40)
    with convert_dataset_errors("owner/name", None):
        hub.download("owner/name", "0" * 40, file, folder / "partial", lambda count: None)


def hub_check(url: str, folder: Path) -> None:
    HubStorage(HubAddress("owner/name")).check(create=True)


def whole(url: str, folder: Path) -> None:
    with convert_dataset_errors(url, None):
        ServedFile(f"{url}/info.json").read()


def part(url: str, folder: Path) -> None:
    with convert_dataset_errors(url, None):
        fetch_part(ServedFile(f"{url}/a.tar", on_hub=True), 0, 9, folder / "partial", lambda count: None)


CLIENTS: dict[str, Callable[[str, Path], None]] = {
    "find": find,
    "list": list_all,
    "read": read,
    "hub list": hub_list,
    "hub download": hub_download,
    "hub check": hub_check,
    "whole": whole,
    "part": part,
}


def error_of(client: str, behaviour: Behaviour, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with misbehaving(behaviour) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises((StorageError, DataError)) as caught:
            CLIENTS[client](server.url, folder)
    assert SECRET not in str(caught.value)
    return str(caught.value)


LISTS = b"<ListBucketResult><IsTruncated>true</IsTruncated>%s</ListBucketResult>"


@pytest.mark.parametrize(
    ("client", "body"),
    [
        ("find", b""),
        ("list", b"no XML"),
        ("list", b"<a>" * 100_000),
        ("list", LISTS % b"<Contents><Key>key/a</Key><Size>-1</Size></Contents>"),
        ("list", LISTS % (b"<Contents><Key>key/a</Key><Size>%s</Size></Contents>" % (b"9" * 5000))),
        ("list", LISTS % b"<NextContinuationToken>again</NextContinuationToken>"),
        ("list", LISTS % b""),
        ("hub list", b"[" * 200_000),
        ("hub list", b'{"sha": 7}'),
        ("hub list", b"\xff"),
        ("hub check", b"[" * 200_000),
    ],
)
def test_nonsensical_response_is_rejected(
    client: str, body: bytes, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MOST_PAGES", 3)
    assert error_of(client, content(body), here, monkeypatch)


@pytest.mark.parametrize(
    ("client", "behaviour"),
    [(item, other) for item in CLIENTS for other in NEVER if (item, other[:7]) != ("list", "interim")],
)
def test_endless_response_is_abandoned(
    client: str, behaviour: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert error_of(client, NEVER[behaviour], here, monkeypatch)


PART = ("206 Part", "Content-Range: bytes 0-8/9")


@pytest.mark.parametrize(
    ("client", "behaviour"),
    [
        ("read", partial(flood, head(*PART), b"x" * PIECE)),
        ("hub download", partial(flood, head(), b"x" * PIECE)),
        ("whole", partial(flood, head(*PART), b"x" * PIECE)),
        ("part", partial(flood, head(*PART), b"x" * PIECE)),
    ],
)
def test_excess_data_stays_unread(
    client: str, behaviour: Behaviour, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "OPEN_LIMIT", 20.0)
    monkeypatch.setattr(s3, "REQUEST_LIMIT_S", 20.0)
    assert re.search("sends more bytes than|sent more than", error_of(client, behaviour, here, monkeypatch))
    assert sum(file.stat().st_size for file in here.glob("[cp]*") if file.is_file()) <= 9


@pytest.mark.parametrize("client", ["whole", "part", "hub download"])
def test_dripping_download_is_aborted(client: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dripping = partial(drip, head("206 Part", "Content-Range: bytes 0-99999/100000"), b"x")
    monkeypatch.setattr(deadline, "PACE_BYTES", 10**9)
    large = RemoteFile("clips.tar", 100_000, "0" * 40)
    monkeypatch.setitem(CLIENTS, "part", lambda url, folder: fetch(url, folder))
    monkeypatch.setitem(CLIENTS, "hub download", lambda url, folder: fetch_hub(large, folder))
    assert "bytes arrived in" in error_of(client, dripping, here, monkeypatch)


def fetch(url: str, folder: Path) -> None:
    with convert_dataset_errors(url, None):
        fetch_part(ServedFile(f"{url}/a.tar"), 0, 100_000, folder / "partial", lambda count: None)


def fetch_hub(file: RemoteFile, folder: Path) -> None:
    with convert_dataset_errors("owner/name", None):
        hub.download("owner/name", "0" * 40, file, folder / "partial", lambda count: None)


@pytest.mark.parametrize("client", ["find", "list", "read"])
@pytest.mark.parametrize("status", REDIRECTS)
def test_s3_redirects_are_not_followed(client: str, status: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with misbehaving(answer({})) as other:
        error_of(client, content(b"", f"Location: {other.url}/x", status=status), here, monkeypatch)
    assert other.requests == []


@pytest.mark.parametrize("client", ["part", "hub download"])
@pytest.mark.parametrize("status", REDIRECTS)
def test_hub_token_stays_with_the_hub(client: str, status: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with misbehaving(content(b"", status="404 Gone")) as other:
        error_of(client, content(b"", f"Location: {other.url}/x", status=status), here, monkeypatch)
    assert other.requests
    assert not any(SECRET.encode() in request for request in other.requests)
