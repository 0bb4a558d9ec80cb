"""Copies in the cache that were damaged after or while they were made."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_data import SourceConfig
from dsreason.data.rows import read_rows
from dsreason.errors import StorageError
from dsreason.files import cache, hub, remote
from dsreason.files.address import S3Address
from dsreason.files.archives import get_media_cache, unpack, unpack_file, write_embedded
from dsreason.files.cache import build_copy
from dsreason.files.s3 import S3Object
from dsreason.media import urls
from dsreason.world.data.shards import read_index

ROWS = "".join(json.dumps({"n": i}) + "\n" for i in range(100)).encode()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def alter_secretly(file: Path) -> None:
    """Change a byte of the file, but keep its size and modification time."""
    status = file.stat()
    time.sleep(0.02)  # time stamps of file systems are coarse
    alter(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGES = [cut, alter, alter_secretly, Path.unlink, lambda file: file.write_bytes(b"")]
IDS = ["cut", "altered", "altered with the old time", "removed", "emptied"]
every_damage = pytest.mark.parametrize("damage", DAMAGES, ids=IDS)
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COSMOS_CACHE", raising=False)
    return tmp_path / "cache"


def assert_one_warning(caplog: pytest.LogCaptureFixture, *fragments: str) -> None:
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and all(fragment in warnings[0] for fragment in fragments), warnings


@every_damage
def test_damaged_copy_is_built_again(damage: Damage, caches: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(partial: Path) -> None:
        (partial / "inner").mkdir(parents=True)
        (partial / "inner" / "a.bin").write_bytes(ROWS)
        (partial / "b.bin").write_bytes(ROWS)

    folder = build_copy(caches / "kind" / "copy", build)
    assert build_copy(folder, build) == folder and not caplog.records
    damage(folder / "inner" / "a.bin")
    assert (build_copy(folder, build) / "inner" / "a.bin").read_bytes() == ROWS
    assert_one_warning(caplog, str(folder), "a.bin", "rebuilding this copy")
    caplog.clear()
    build_copy(folder, lambda partial: pytest.fail("built"))
    assert not caplog.records


@pytest.mark.parametrize("content", ["", "[]", '{"b.bin": 3}'])
def test_copy_without_valid_record_is_rebuilt(content: str, caches: Path) -> None:
    builds = []

    def build(partial: Path) -> None:
        builds.append(partial)
        partial.mkdir(parents=True)
        (partial / "b.bin").write_bytes(ROWS)

    build_copy(caches / "kind" / "copy", build)
    (caches / "kind" / cache.RECORDS / "copy.json").write_text(content)
    build_copy(caches / "kind" / "copy", build)
    assert len(builds) == 2


def make_old_copy(caches: Path) -> Path:
    folder = caches / "kind" / "copy"
    folder.mkdir(parents=True)
    (folder / "b.bin").write_bytes(ROWS)
    return folder


def test_copy_of_older_version_is_adopted(caches: Path) -> None:
    folder = make_old_copy(caches)
    assert (build_copy(folder, lambda partial: pytest.fail("built")) / "b.bin").read_bytes() == ROWS
    cut(folder / "b.bin")
    with pytest.raises(OSError, match="is down"):
        build_copy(folder, fail)


def test_old_copy_in_read_only_cache_works(
    caches: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_old_copy(caches)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for _ in range(2):
        build_copy(folder, lambda partial: pytest.fail("built"))
    assert_one_warning(caplog, "is read-only", str(folder.parent))
    assert not (folder.parent / cache.RECORDS).exists()


def fail(partial: Path) -> None:
    partial.mkdir(exist_ok=True)
    raise OSError("the network is down")


def test_damaged_copy_stays_if_source_is_gone(caches: Path) -> None:
    def build(partial: Path) -> None:
        partial.mkdir(parents=True, exist_ok=True)
        for name in ("a.bin", "b.bin"):
            (partial / name).write_bytes(ROWS)

    folder = build_copy(caches / "kind" / "copy", build)
    cut(folder / "a.bin")
    for _ in range(2):
        with pytest.raises(OSError, match="is down"):
            build_copy(folder, fail)
    assert (folder / "b.bin").read_bytes() == ROWS
    assert (build_copy(folder, build) / "a.bin").read_bytes() == ROWS
    assert sorted(path.name for path in folder.parent.iterdir()) == [".locks", cache.RECORDS, "copy"]


def test_touched_copy_is_hashed_once(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a cache that was moved to another disk."""

    def build(partial: Path) -> None:
        partial.mkdir(parents=True)
        (partial / "b.bin").write_bytes(ROWS)

    folder = build_copy(caches / "kind" / "copy", build)
    os.utime(folder / "b.bin", (1, 1))
    hashed: list[Path] = []
    original = cache.compute_sha256
    monkeypatch.setattr(cache, "compute_sha256", lambda file: hashed.append(file) or original(file))
    for _ in range(2):
        build_copy(folder, lambda partial: pytest.fail("built"))
    assert hashed == [folder / "b.bin"]


@every_damage
def test_damaged_member_is_unpacked_again(damage: Damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tarfile.open(tmp_path / "clips.tar", "w") as tar:
        for name in ("a/1.mp4", "a/2.mp4"):
            member = tarfile.TarInfo(name)
            member.size = len(ROWS)
            tar.addfile(member, io.BytesIO(ROWS))
    damage(unpack(tmp_path / "clips.tar") / "a" / "2.mp4")
    folder = unpack(tmp_path / "clips.tar")
    assert [(folder / "a" / name).read_bytes() for name in ("1.mp4", "2.mp4")] == [ROWS, ROWS]
    assert_one_warning(caplog, "2.mp4")


@every_damage
def test_damaged_unpacked_table_is_unpacked_again(damage: Damage, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(ROWS))
    damage(unpack_file(tmp_path / "rows.jsonl.gz"))
    assert len(read_rows(SourceConfig(adapter="jsonl", path=str(tmp_path / "rows.jsonl.gz")))) == 100


@every_damage
def test_damaged_embedded_file_is_written_again(damage: Damage) -> None:
    file = write_embedded(ROWS, ".png")
    damage(file)
    assert write_embedded(ROWS, ".png") == file
    assert file.read_bytes() == ROWS and file.is_relative_to(get_media_cache())


@every_damage
def test_damaged_copy_of_url_is_fetched_again(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(url: str, allow_private: bool, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(ROWS)

    monkeypatch.setattr(urls, "_fetch", fetch)
    damage(urls.fetch_url("https://example.org/a.png", allow_private=False))
    assert urls.fetch_url("https://example.org/a.png", allow_private=False).read_bytes() == ROWS


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A bucket whose objects contain `ROWS`; the returned list records the first byte of each read."""
    starts: list[int] = []
    etag = f'"{hashlib.md5(ROWS, usedforsecurity=False).hexdigest()}"'

    def read_into(source: S3Object, file: Path) -> None:
        with file.open("ab") as target:
            starts.append(target.tell())
            target.write(ROWS[target.tell() :])

    def find(address: S3Address) -> S3Object:
        return S3Object(address, len(ROWS), etag, "version 1")

    monkeypatch.setattr(remote, "read_into", read_into)
    monkeypatch.setattr(remote, "find_object", find)
    monkeypatch.setattr(remote, "list_objects", lambda folder: {name: find(folder / name) for name in ("a.jsonl", "b")})
    remote._fetch_copy.cache_clear()
    return starts


@every_damage
def test_damaged_copies_of_objects_are_fetched_again(damage: Damage, bucket: list[int]) -> None:
    damage(remote.fetch_file("s3://bucket/rows.jsonl"))
    damage(remote.fetch_folder("s3://bucket/folder", lambda name: True) / "b")
    remote._fetch_copy.cache_clear()  # simulates another process
    assert remote.fetch_file("s3://bucket/rows.jsonl").read_bytes() == ROWS
    assert (remote.fetch_folder("s3://bucket/folder", lambda name: True) / "b").read_bytes() == ROWS


@pytest.mark.parametrize(
    ("content", "starts"),
    [
        (ROWS[:50], [50]),
        (b"x" + ROWS[1:50], [50, 0]),
        (ROWS + b"more", [0]),
        (bytes(len(ROWS)), [len(ROWS), 0]),
    ],
    ids=["intact", "altered", "too long", "zeros"],
)
def test_interrupted_fetch_is_checked(content: bytes, starts: list[int], bucket: list[int], caches: Path) -> None:
    first = remote.fetch_file("s3://bucket/rows.jsonl")
    folder = first.parent
    partial = folder.rename(folder.with_name(f"{folder.name}.partial"))
    (partial / first.name).write_bytes(content)
    remote._fetch_copy.cache_clear()
    bucket.clear()
    assert remote.fetch_file("s3://bucket/rows.jsonl").read_bytes() == ROWS
    assert bucket == starts


@every_damage
def test_damaged_index_of_shard_is_built_again(damage: Damage, tmp_path: Path, caches: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 5
            tar.addfile(member, io.BytesIO(b"a red"))
    first = read_index(tmp_path / "a.tar", "a.tar")
    (index,) = caches.glob("world/shards/*/index.json")
    damage(index)
    assert read_index(tmp_path / "a.tar", "a.tar") == first


def cut_between_batches(file: Path) -> None:
    """Truncate an Arrow file so that it can be read without an error, but with fewer rows."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        pyarrow.ipc.open_stream(source).read_next_batch()
        end = source.tell()
    with file.open("r+b") as opened:
        opened.truncate(end)


@pytest.mark.parametrize("damage", [*DAMAGES, cut_between_batches], ids=[*IDS, "cut between batches"])
def test_damaged_table_is_converted_again(
    damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "rows.csv").write_text("n\n" + "".join(f"{i}\n" for i in range(3000)))

    def read() -> list[Any]:
        rows = read_rows(SourceConfig(adapter="auto", path=str(tmp_path / "rows.csv")))
        return [rows[i]["n"] for i in (0, 1500, len(rows) - 1)]

    expected = read()
    (arrow,) = tmp_path.glob("datasets/csv/**/*.arrow")
    damage(arrow)
    assert read() == expected == ["0", "1500", "2999"]
    assert_one_warning(caplog, "rows.csv", "damaged")
    caplog.clear()
    assert read() == expected and not caplog.records


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Hub with two files and a cache in huggingface_hub's layout; the returned list records the downloaded names."""
    named: list[str] = []
    blobs = tmp_path / "hub" / "blobs"
    small = hashlib.sha1(b"blob 2\0{}", usedforsecurity=False).hexdigest()
    contents = {"rows.jsonl": (hashlib.sha256(ROWS).hexdigest(), ROWS), "config.json": (small, b"{}")}

    def download(repo: str, **options: object) -> str:
        snapshot = tmp_path / "hub" / "snapshots" / "main"
        for folder in (blobs, snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        for name, (etag, content) in contents.items():
            if not (snapshot / name).exists() or (options.get("force_download") and name in options["allow_patterns"]):  # type: ignore[operator]
                named.append(name)
                (blobs / etag).write_bytes(content)
                (snapshot / name).unlink(missing_ok=True)
                (snapshot / name).symlink_to(blobs / etag)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    return named


@every_damage
@pytest.mark.parametrize("name", ["rows.jsonl", "config.json"])
def test_damaged_hub_file_is_downloaded_again(
    name: str, damage: Damage, downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.fetch_snapshot("user/name")
    damage((folder / name).resolve())
    expected = ROWS if name == "rows.jsonl" else b"{}"
    assert (hub.fetch_snapshot("user/name") / name).read_bytes() == expected
    assert downloads == ["rows.jsonl", "config.json", name]
    monkeypatch.setattr(cache, "compute_sha256", lambda file: pytest.fail(f"read {file} again"))
    hub.fetch_snapshot("user/name")


def test_damage_before_first_check_is_noticed(downloads: list[str]) -> None:
    """Detect damage without a record, because the name of a file in the Hub's cache is its hash."""
    cut((Path(hub.snapshot_download("user/name")) / "rows.jsonl").resolve())
    assert (hub.fetch_snapshot("user/name") / "rows.jsonl").read_bytes() == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "config.json"])
def test_damaged_hub_file_stays_when_offline(
    name: str, downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = hub.fetch_snapshot("user/name") / name
    alter(file)
    damaged = file.read_bytes()
    monkeypatch.setattr(hub, "snapshot_download", lambda repo, **options: str(file.parent))  # as it does when offline
    for _ in range(2):
        with pytest.raises(StorageError, match=f"{name} is damaged and cannot be downloaded again"):
            hub.fetch_snapshot("user/name")
    assert file.read_bytes() == damaged


@pytest.mark.parametrize(
    ("digest", "count"),
    [(hashlib.sha1(b"{}").hexdigest(), 1), ("a" * 40, 2), ("tag", 1)],
    ids=["plain SHA-1", "unknown hash", "no hash"],
)
def test_mirror_with_other_etags_is_usable(
    digest: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob, link = tmp_path / "blobs" / digest, tmp_path / "snapshots" / "main" / "config.json"
    calls = []

    def download(repo: str, **options: object) -> str:
        calls.append(options)
        if not blob.exists() or options.get("force_download"):
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.parent.mkdir(exist_ok=True)
            blob.unlink(missing_ok=True)
            blob.write_bytes(b"{}")
            link.unlink(missing_ok=True)
            link.symlink_to(blob)
        return str(link.parent)

    monkeypatch.setattr(hub, "snapshot_download", download)
    hub.fetch_snapshot("user/name")
    assert len(calls) == count
    os.utime(blob, (1, 1))
    hub.fetch_snapshot("user/name")
    assert len(calls) == count + 1


def test_blobs_in_shared_store_are_sound(downloads: list[str], tmp_path: Path) -> None:
    """The files of huggingface_hub's shared store are named after another hash."""
    blob = (Path(hub.snapshot_download("user/name")) / "rows.jsonl").resolve()
    blob.rename(tmp_path / ("0" * 64))
    blob.symlink_to(tmp_path / ("0" * 64))
    hub.fetch_snapshot("user/name")
    assert downloads == ["rows.jsonl", "config.json"]
