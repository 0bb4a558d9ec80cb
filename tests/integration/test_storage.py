"""Uploads to and reads from a real S3 server through a proxy that injects faults, and uploads to a stand-in for the Hub."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import psutil
import pytest
from huggingface_hub import constants
from moto.server import ThreadedMotoServer
from PIL import Image

from dsreason.config.schema import ModelConfig
from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.config.schema_data import DataConfig
from dsreason.data.sources import open_datasets
from dsreason.errors import CheckpointError, ConfigError, DataError, StorageError
from dsreason.files import remote, retries, s3
from dsreason.files.address import S3Address, parse_target
from dsreason.files.remote import fetch_file, fetch_folder
from dsreason.media.images import load_image, probe_image
from dsreason.models.load import resolve_model
from dsreason.models.processors.loading import load_processor
from dsreason.storage import storage_s3
from dsreason.storage.package import Sent, open_package
from dsreason.storage.storage import check_target, upload
from dsreason.storage.uploads import open_uploads
from tests.integration.command import COMMAND, dsreason
from tests.integration.hub_server import TOKEN, LocalHub, hub_server
from tests.integration.rows import write_mixed_rows
from tests.integration.s3_server import KEY, REGION, SECRET, Proxy, ServerFault, proxy_to
from tests.unit.checkpoints.made_folders import EXPORT_BYTES, make_checkpoint, make_export

pytestmark = pytest.mark.integration

PART = 5 * 1024**2
"""Minimum size of a part of an S3 upload, in bytes."""
TARGET = S3Address("bucket", "run")
KEYS = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Yield a botocore client that bypasses the proxy, on a server with the bucket `bucket`."""
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto.start()
    client = botocore.session.get_session().create_client(
        "s3", REGION, endpoint_url="http://{}:{}".format(*moto.get_host_and_port()), **KEYS
    )
    client.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": REGION})
    yield client
    client.close()
    moto.stop()


@pytest.fixture(scope="module")
def open_proxy(server: Any) -> Iterator[Proxy]:
    with proxy_to(server.meta.endpoint_url.removeprefix("http://")) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    remote._fetch_copy.cache_clear()  # a new process would also start with an empty cache
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(storage_s3, "PART_BYTES", PART)


@pytest.fixture
def proxy(server: Any, open_proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Yield the proxy that S3 requests pass through; the bucket is empty."""
    open_proxy.faults, open_proxy.seen, open_proxy.says = [], [], "said the test"
    monkeypatch.setenv("AWS_ENDPOINT_URL", open_proxy.address)
    yield open_proxy
    for key in objects(server):
        server.delete_object(Bucket="bucket", Key=key)


def objects(server: Any) -> dict[str, bytes]:
    keys = [entry["Key"] for entry in server.list_objects_v2(Bucket="bucket").get("Contents", [])]
    return {key: server.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}


def put(server: Any, key: str, content: bytes) -> None:
    server.put_object(Bucket="bucket", Key=key, Body=content)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Create an export whose largest file is uploaded in three parts."""
    return make_export(
        tmp_path / "D" / "export" / "final", weights=os.urandom(2 * PART + 1000 - 88)
    )  # the 88 bytes are the file's header


# ---------------------------------------------------------------- S3, uploads


def test_export_upload_ends_with_manifest(server: Any, proxy: Proxy, export: Path) -> None:
    done: list[int] = []
    assert upload(open_package(export), TARGET, done.append) == Sent(2, 2 * PART + 1002)
    assert sum(done) == 2 * PART + 1002
    result = objects(server)
    manifest = json.loads(result.pop("run/UPLOADED.json"))
    assert result == {f"run/{name}": content for name, content in files_of(export).items()}
    assert manifest["files"]["model.safetensors"] == {
        "size": 2 * PART + 1000,
        "sha256": hashlib.sha256(files_of(export)["model.safetensors"]).hexdigest(),
    }
    assert [line for line in proxy.seen if line.startswith("PUT")][-1] == "PUT /bucket/run/UPLOADED.json"
    assert sum("partNumber=" in line for line in proxy.seen) == 3


def test_checkpoint_upload_ends_with_marker(server: Any, proxy: Proxy, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoints" / "step_4")
    upload(open_package(folder), TARGET)
    assert objects(server) == {f"run/{name}": content for name, content in files_of(folder).items()}
    assert [line for line in proxy.seen if line.startswith("PUT")][-1] == "PUT /bucket/run/COMPLETE"


def test_reupload_removes_marker_and_sends_only_changes(server: Any, proxy: Proxy, export: Path) -> None:
    upload(open_package(export), TARGET)
    assert upload(open_package(export), TARGET) == Sent(0, 0)
    (export / "config.json").write_text("[]")  # the new content has the same size
    proxy.seen.clear()
    assert upload(open_package(export), TARGET) == Sent(1, 2)
    changes = [line for line in proxy.seen if not line.startswith("HEAD")]
    assert changes == [
        "DELETE /bucket/run/UPLOADED.json",
        "PUT /bucket/run/config.json",
        "PUT /bucket/run/UPLOADED.json",
    ]
    assert objects(server)["run/config.json"] == b"[]"


@pytest.mark.parametrize(
    "faults",
    [
        [ServerFault("PUT", "503 SlowDown", "config.json")] * 3,
        [ServerFault("PUT", "500 InternalError", "partNumber=2")] * 2,
        [ServerFault("PUT", "cut", "partNumber=2"), ServerFault("PUT", "cut", "config.json")],
        [ServerFault("PUT", "lose answer", "partNumber=3"), ServerFault("POST", "lose answer", "uploadId=")],
        [ServerFault("PUT", "damage", "partNumber=1"), ServerFault("PUT", "damage", "config.json")],
        [ServerFault("HEAD", "503 SlowDown"), ServerFault("POST", "500 InternalError", "uploads")],
        [ServerFault("PUT", "429 TooManyRequests", "UPLOADED.json")],
    ],
    ids=lambda faults: f"{faults[0].kind} {faults[0].path}",
)
def test_temporary_faults_are_retried(server: Any, proxy: Proxy, export: Path, faults: list[ServerFault]) -> None:
    proxy.faults = list(faults)
    upload(open_package(export), TARGET)
    assert proxy.faults == []
    result = objects(server)
    assert result.pop("run/UPLOADED.json")
    assert result == {f"run/{name}": content for name, content in files_of(export).items()}


def test_unresponsive_server_times_out(
    server: Any, proxy: Proxy, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_LIMIT_S", 0.3)
    proxy.faults = [ServerFault("PUT", "hang", "config.json")]
    upload(open_package(export), TARGET)
    assert "run/UPLOADED.json" in objects(server)
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    proxy.faults = [ServerFault("PUT", "hang")] * 50
    (export / "config.json").write_text("[]")
    with pytest.raises(StorageError, match=r"^s3://bucket/run/config\.json: .*[Tt]imeout"):
        upload(open_package(export), TARGET)


@pytest.mark.parametrize(
    ("fault", "message", "retries"),
    [
        (
            ServerFault("PUT", "403 AccessDenied"),
            "the server responds with 403 AccessDenied (said the test); these keys do not permit the request",
            0,
        ),
        (ServerFault("PUT", "403 SignatureDoesNotMatch"), "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", 0),
        (ServerFault("PUT", "400 AuthorizationHeaderMalformed"), "set AWS_REGION to the region of the bucket", 0),
        (ServerFault("PUT", "503 SlowDown"), "the server responds with 503 SlowDown (said the test)", 5),
        (ServerFault("PUT", "cut"), "Connection was closed", 5),
        (ServerFault("PUT", "damage"), "corrupted in transit", 5),
    ],
    ids=lambda value: value.kind if isinstance(value, ServerFault) else "",
)
def test_failed_upload_is_reported_without_a_marker(
    server: Any,
    proxy: Proxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: ServerFault,
    message: str,
    retries: int,
) -> None:
    folder = make_export(tmp_path / "model")
    before = files_of(folder)
    proxy.faults = [fault] * 100
    with pytest.raises(StorageError) as caught:
        upload(open_package(folder), TARGET)
    assert str(caught.value).startswith("s3://bucket/run/config.json: ")
    assert message in str(caught.value)
    assert caplog.text.count("retrying in") == retries
    assert "run/UPLOADED.json" not in objects(server)
    assert files_of(folder) == before


def test_parts_of_failed_upload_are_removed(server: Any, proxy: Proxy, export: Path) -> None:
    proxy.faults = [ServerFault("PUT", "403 AccessDenied", "partNumber=2")]
    with pytest.raises(StorageError, match="403 AccessDenied"):
        upload(open_package(export), TARGET)
    assert server.list_multipart_uploads(Bucket="bucket").get("Uploads", []) == []


def test_upload_resumes_after_failure(server: Any, proxy: Proxy, export: Path) -> None:
    proxy.faults = [ServerFault("PUT", "403 AccessDenied", "model.safetensors")] * 10
    with pytest.raises(StorageError):
        upload(open_package(export), TARGET)
    proxy.faults = []
    assert upload(open_package(export), TARGET) == Sent(1, 2 * PART + 1000)  # config.json had already been uploaded
    assert "run/UPLOADED.json" in objects(server)


def test_killed_upload_is_completed_by_next_push(server: Any, proxy: Proxy, export: Path, tmp_path: Path) -> None:
    proxy.faults = [ServerFault("PUT", "hang", "model.safetensors")]
    push = ["push", str(export), "--to", "s3://bucket/run"]
    with subprocess.Popen(
        [*COMMAND, *push], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        while proxy.faults and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert "run/UPLOADED.json" not in objects(server)
    completed = dsreason(*push, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    sent = objects(server)
    assert {name: sent[f"run/{name}"] for name in files_of(export)} == files_of(export)
    assert proxy.seen[-1].startswith("PUT /bucket/run/UPLOADED.json") and "run/UPLOADED.json" in sent


def test_target_check_removes_its_probe_object(server: Any, proxy: Proxy) -> None:
    check_target("s3://bucket/run")
    assert [line.split()[0] for line in proxy.seen] == ["PUT", "HEAD", "DELETE"]
    assert objects(server) == {}


def test_unwritable_target_is_config_error(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^checkpoint\.upload: s3://other/.* 404 NoSuchBucket .*create the bucket other"
    ):
        check_target("s3://other/run")
    proxy.faults = [ServerFault("PUT", "403 AccessDenied")]
    with pytest.raises(ConfigError, match="403 AccessDenied"):
        check_target("s3://bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(ConfigError, match="Could not connect"):
        check_target("s3://bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:sentinel@127.0.0.1")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL contains a user name and a password") as caught:
        check_target("s3://bucket/run")
    assert "sentinel" not in str(caught.value)


def test_outage_is_tolerated_but_refusal_raises(server: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.faults = [ServerFault("PUT", "503 SlowDown")] * 2
    check_target("s3://bucket/run", tolerate_outage=True)
    assert "checkpoint.upload: s3://bucket/run/" in caplog.text
    assert "503 SlowDown (said the test); training continues" in caplog.text
    proxy.faults = [ServerFault("PUT", "403 AccessDenied")]
    with pytest.raises(ConfigError, match="403 AccessDenied"):
        check_target("s3://bucket/run", tolerate_outage=True)


def test_missing_s3_keys_are_reported(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3._create_client.cache_clear()  # a new process would also start with an empty cache
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no credentials are set; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        check_target("s3://bucket/run")
    s3._create_client.cache_clear()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_failed_background_upload_is_reported_at_end(server: Any, proxy: Proxy, tmp_path: Path) -> None:
    config = CheckpointConfig(upload="s3://bucket/run", upload_what="all")
    first, second = (make_checkpoint(tmp_path / "D" / "checkpoints" / f"step_{n}") for n in (1, 2))
    before = files_of(tmp_path)
    proxy.faults = [ServerFault("PUT", "403 AccessDenied", "step_2/weights.pt")] * 2
    with pytest.raises(StorageError) as caught, open_uploads(config) as uploads:
        uploads.add(first, last=False)
        uploads.add(second, last=True)
    assert f"dsreason push {second} --to s3://bucket/run/checkpoints/step_2" in str(caught.value)
    assert str(first) not in str(caught.value)
    assert "run/checkpoints/step_1/COMPLETE" in objects(server)
    assert "run/checkpoints/step_2/COMPLETE" not in objects(server)
    assert {name: content for name, content in files_of(tmp_path).items() if name != "D/uploads.json"} == before


# ---------------------------------------------------------------- S3, reading


def png(color: str = "red") -> bytes:
    import io

    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(buffer, "PNG")
    return buffer.getvalue()


def cached(tmp_path: Path) -> list[Path]:
    return [
        path
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and not {".locks", ".records"} & {*path.parts}
    ]


def test_s3_media_are_fetched_only_once(server: Any, proxy: Proxy, tmp_path: Path) -> None:
    put(server, "a b.png", png())
    assert probe_image("s3://bucket/a b.png") == (3, 4)
    assert load_image("s3://bucket/a b.png").getpixel((0, 0)) == (255, 0, 0)
    assert [line.split()[0] for line in proxy.seen].count("GET") == 1
    assert [path.name for path in cached(tmp_path)] == ["a b.png"]


def test_replaced_object_is_fetched_again(server: Any, proxy: Proxy) -> None:
    put(server, "a.png", png())
    first = fetch_file("s3://bucket/a.png")
    put(server, "a.png", png("blue"))
    remote._fetch_copy.cache_clear()  # a new process would also start with an empty cache
    second = fetch_file("s3://bucket/a.png")
    assert first != second
    assert second.read_bytes() == png("blue")


def test_deleted_cached_copy_is_fetched_again(server: Any, proxy: Proxy) -> None:
    put(server, "a.png", png())
    shutil.rmtree(fetch_file("s3://bucket/a.png").parent)
    assert fetch_file("s3://bucket/a.png").read_bytes() == png()


def test_interrupted_download_resumes_under_partial_name(
    server: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_BYTES", 1000)
    content = os.urandom(5500)
    put(server, "clip.mp4", content)
    proxy.faults = [ServerFault("GET", "cut answer")] * 2 + [ServerFault("GET", "503 SlowDown")]
    assert fetch_file("s3://bucket/clip.mp4").read_bytes() == content

    put(server, "other.mp4", content)
    proxy.faults = [ServerFault("GET", "403 AccessDenied", "other.mp4")]
    monkeypatch.setattr(proxy, "take", failing_third_get(proxy))
    with pytest.raises(StorageError, match=r"^s3://bucket/other\.mp4: the server responds with 403"):
        fetch_file("s3://bucket/other.mp4")
    (begun,) = [path for path in cached(tmp_path) if path.name == "other.mp4"]
    assert begun.parent.suffix == ".partial"
    assert begun.read_bytes() == content[:2000]


def failing_third_get(proxy: Proxy) -> Any:
    gets: list[str] = []

    def take(method: str, path: str) -> str:
        if method == "GET":
            gets.append(path)
        return "403 AccessDenied" if len(gets) == 3 else ""

    return take


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/none.png", "s3://bucket/none.png: the object or the bucket bucket does not exist"),
        ("s3://nowhere/a.png", "the bucket nowhere does not exist"),
        ("s3://bucket", "is a bucket, not a file"),
        ("s3://key:sentinel@bucket/a.png", "an S3 URI must not contain keys"),
        ("http://host/a.png", "media must be local files or s3:// URIs"),
        ("https://host/a.png", "media must be local files or s3:// URIs"),
    ],
)
def test_unreadable_media_uri_is_data_error(proxy: Proxy, address: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_image(address)
    assert message in str(caught.value)
    assert "sentinel" not in str(caught.value)


@pytest.mark.parametrize("kind", ["403 AccessDenied", "503 SlowDown"])
def test_refused_download_is_storage_error(server: Any, proxy: Proxy, kind: str) -> None:
    put(server, "a.png", png())
    proxy.faults = [ServerFault("GET", kind)] * 10
    with pytest.raises(StorageError, match=kind):
        load_image("s3://bucket/a.png")


def fetch_in_process(address: str) -> tuple[str, int]:
    path = fetch_file(address)
    return str(path), path.stat().st_size


def test_forked_processes_fetch_object_only_once(server: Any, proxy: Proxy) -> None:
    put(server, "first.bin", b"1")
    fetch_file("s3://bucket/first.bin")  # forked processes must not reuse the connection that this process has opened
    put(server, "large.bin", os.urandom(10**6))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        result = set(pool.map(fetch_in_process, ["s3://bucket/large.bin"] * 8, chunksize=1))
    assert [size for _, size in result] == [10**6]
    assert sum(line.startswith("GET /bucket/large.bin") for line in proxy.seen) == 1


def test_data_set_in_s3_resolves_adjacent_media(server: Any, proxy: Proxy) -> None:
    rows = [
        {"id": "1", "image": "media/a.png", "question": "?", "answer": "red"},
        {"id": "2", "image": "s3://bucket/elsewhere/b.png", "question": "?", "answer": "blue"},
    ]
    put(server, "set/train.jsonl", "\n".join(map(json.dumps, rows)).encode())
    put(server, "set/media/a.png", png())
    put(server, "elsewhere/b.png", png("blue"))
    for path in ("s3://bucket/set/train.jsonl", "s3://bucket/set"):
        training, _ = open_datasets(DataConfig(adapter="jsonl", path=path))
        media = [sample.messages[0]["content"][0]["image"] for sample in training]
        assert media == ["s3://bucket/set/media/a.png", "s3://bucket/elsewhere/b.png"]
        assert [load_image(file).getpixel((0, 0)) for file in media] == [(255, 0, 0), (0, 0, 255)]


def test_local_rows_use_s3_media_path(server: Any, proxy: Proxy, tmp_path: Path) -> None:
    row = {"id": "1", "image": "a.png", "question": "?", "answer": "red"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = DataConfig(adapter="jsonl", path=str(tmp_path / "rows.jsonl"), media_path="s3://bucket/media")
    sample = open_datasets(config)[0][0]
    assert sample.messages[0]["content"][0]["image"] == "s3://bucket/media/a.png"


def test_media_cannot_leave_media_path_in_s3(proxy: Proxy, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "1", "image": "../a.png", "question": "?", "answer": "x"}))
    config = DataConfig(adapter="jsonl", path=str(tmp_path / "rows.jsonl"), media_path="s3://bucket/media")
    with pytest.raises(DataError, match=r"row 1 .*\.\./a\.png is outside s3://bucket/media"):
        _ = open_datasets(config)[0][0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/none.jsonl", "the object or the bucket bucket does not exist"),
        ("s3://bucket/none", "no objects exist below this URI"),
        ("s3://key:sentinel@bucket/rows.jsonl", "an S3 URI must not contain keys"),
        ("https://me:sentinel@host/rows.jsonl", "https://…@host/rows.jsonl is a URL"),
    ],
)
def test_missing_data_set_is_reported(proxy: Proxy, path: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        open_datasets(DataConfig(adapter="jsonl", path=path))
    assert message in str(caught.value)
    assert "sentinel" not in str(caught.value)


def test_object_name_outside_folder_is_rejected(server: Any, proxy: Proxy, tmp_path: Path) -> None:
    put(server, "set/../../evil.json", b"[]")
    with pytest.raises(DataError, match="would be written outside its folder"):
        fetch_folder("s3://bucket/set", lambda name: True)
    assert cached(tmp_path) == []


def test_s3_model_omits_pickles_and_subfolders(
    server: Any, proxy: Proxy, tiny_qwen2_5_vl: Path, tmp_path: Path
) -> None:
    for name, content in files_of(tiny_qwen2_5_vl).items():
        put(server, f"models/tiny/{name}", content)
    put(server, "models/tiny/pytorch_model.bin", b"pickle")
    put(server, "models/tiny/checkpoints/step_1/rng.safetensors", b"")
    folder = resolve_model(ModelConfig(path="s3://bucket/models/tiny"), tmp_path / "models")
    assert files_of(folder) == files_of(tiny_qwen2_5_vl)
    load_processor(folder)
    assert resolve_model(ModelConfig(path="s3://bucket/models/tiny/"), tmp_path / "models") == folder


def test_missing_model_is_reported(server: Any, proxy: Proxy, tmp_path: Path) -> None:
    put(server, "models/other/readme.txt", b"x")
    for path, message in {
        "s3://bucket/none": "no objects exist below this URI",
        "s3://bucket/models/other": "has no config.json",
        "https://me:sentinel@host/model": "https://…@host/model: URLs are not supported",
    }.items():
        with pytest.raises(CheckpointError, match="^model.path") as caught:
            resolve_model(ModelConfig(path=path), tmp_path)
        assert message in str(caught.value)
        assert "sentinel" not in str(caught.value)


# ---------------------------------------------------------------- the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    sleep = time.sleep
    # The library's waiting times cannot be configured.
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server() as (result, address):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield result


def test_hub_export_is_private_with_manifest_last(hub: LocalHub, tmp_path: Path) -> None:
    folder = make_export(tmp_path / "export" / "final")
    upload(open_package(folder), parse_target("hub:user/name"))
    repositories = hub.repositories["user/name@main"]
    assert json.loads(repositories["UPLOADED.json"])["files"].keys() == {"config.json", "model.safetensors"}
    assert {name: repositories[name] for name in files_of(folder)} == files_of(folder)
    assert hub.commits == [["config.json", "model.safetensors"], ["UPLOADED.json"]]
    [created] = hub.created
    assert created.get("visibility") == "private" or created.get("private"), "the second of huggingface_hub 1.5"


@pytest.mark.parametrize(("target", "place"), [("hub:user/name", ""), ("hub:user/name/export@dev", "export/")])
def test_existing_model_card_is_kept(
    hub: LocalHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str, place: str
) -> None:
    folder = make_export(tmp_path / "export" / "final")
    (folder / "README.md").write_text("made by the run")
    upload(open_package(folder), parse_target(target))
    repositories = hub.repositories["user/name@dev" if "@" in target else "user/name@main"]
    assert repositories[f"{place}README.md"] == b"made by the run"
    assert "README.md" in json.loads(repositories[f"{place}UPLOADED.json"])["files"]
    assert "stays" not in caplog.text

    repositories[f"{place}README.md"] = b"license: the owner's"
    (folder / "README.md").write_text("made again")
    upload(open_package(folder), parse_target(target))
    assert repositories[f"{place}README.md"] == b"license: the owner's"
    assert "README.md" not in json.loads(repositories[f"{place}UPLOADED.json"])["files"]
    assert f"{target}: the existing README.md is kept; delete it" in caplog.text


def test_checkpoint_uploads_to_requested_folder_and_branch(hub: LocalHub, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoints" / "step_4")
    (folder / "universal").mkdir()
    (folder / "universal" / "made_later").write_text("x")
    upload(open_package(folder), parse_target("hub:user/name/checkpoints/step_4@dev"))
    assert sorted(hub.repositories["user/name@dev"]) == [
        f"checkpoints/step_4/{name}" for name in ("COMPLETE", "trainer_state.json", "weights.pt")
    ]
    assert hub.commits[-1] == ["checkpoints/step_4/COMPLETE"]


@pytest.mark.parametrize("refused", ["create", "preupload", "commit"])
def test_temporary_hub_refusal_is_retried(hub: LocalHub, tmp_path: Path, refused: str) -> None:
    hub.refuse, hub.refused, hub.times = 503, refused, 1
    upload(open_package(make_export(tmp_path / "model")), parse_target("hub:user/name"))
    assert hub.times == 0
    assert "UPLOADED.json" in hub.repositories["user/name@main"]


@pytest.mark.parametrize(
    ("refused", "status", "message"),
    [
        ("create", 401, "the token in HF_TOKEN is missing, invalid or expired"),
        ("create", 403, "the token in HF_TOKEN has no write access"),
        ("create", 429, "there were too many requests; try again later"),
        ("preupload", 401, "the token in HF_TOKEN is missing, invalid or expired"),
        ("preupload", 404, "the repository or branch does not exist"),
        ("preupload", 500, "the server failed; try again later"),
        ("commit", 403, "the token in HF_TOKEN has no write access"),
        ("commit", 429, "there were too many requests; try again later"),
        ("commit", 500, "the server failed; try again later"),
    ],
)
def test_hub_refusal_is_reported(hub: LocalHub, tmp_path: Path, refused: str, status: int, message: str) -> None:
    folder = make_export(tmp_path / "model")
    before = files_of(folder)
    hub.refuse, hub.refused = status, refused
    with pytest.raises(StorageError) as caught:
        upload(open_package(folder), parse_target("hub:user/name"))
    assert str(caught.value).startswith(f"hub:user/name: the Hub responds with {status} (said the test): {message}")
    assert hub.commits == []
    assert files_of(folder) == before


@pytest.mark.parametrize("target", ["hub:user/name", "hub:team/name@dev"])
def test_hub_check_creates_repository_only_on_request(hub: LocalHub, target: str) -> None:
    check_target(target)
    assert (hub.created, hub.repositories, hub.commits) == ([], {}, [])
    check_target(target, create=True)
    assert len(hub.created) == 1
    assert hub.commits == []
    check_target(target)


def test_foreign_hub_repository_is_rejected_before_creation(hub: LocalHub) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.upload: hub:stranger/name: the token .* belongs to user, who"):
        check_target("hub:stranger/name")


def test_hub_target_check_makes_no_commit(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    check_target("hub:user/name", create=True)
    assert hub.commits == []
    assert any("preupload" in line for line in hub.seen)
    hub.refuse, hub.refused = 403, "preupload"
    with pytest.raises(ConfigError, match="^checkpoint.upload: hub:user/name: the Hub responds with 403"):
        check_target("hub:user/name")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "none")
    with pytest.raises(ConfigError, match="no token is set; set HF_TOKEN"):
        check_target("hub:user/name")


def test_unreachable_hub_is_reported(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    with pytest.raises(StorageError, match=r"^hub:user/name: .*[Cc]onnect"):
        upload(open_package(make_export(tmp_path / "model")), parse_target("hub:user/name"))


def test_hub_refusal_does_not_stop_s3_upload(server: Any, proxy: Proxy, hub: LocalHub, tmp_path: Path) -> None:
    config = CheckpointConfig(upload=("s3://bucket/run", "hub:user/name"), upload_what="all")
    run = tmp_path / "D"
    first = make_checkpoint(run / "checkpoints" / "step_1")
    final = make_export(run / "export" / "final")
    hub.refuse, hub.refused = 403, "preupload"
    with pytest.raises(StorageError) as caught, open_uploads(config) as uploads:
        uploads.add(first, last=False)
        uploads.add(final, last=True)
    assert f"dsreason push {final} --to hub:user/name" in str(caught.value)
    assert "s3://" not in str(caught.value)
    assert {"run/checkpoints/step_1/COMPLETE", "run/export/final/UPLOADED.json"} <= objects(server).keys()
    hub.refuse = None
    proxy.seen.clear()
    with open_uploads(config) as uploads:  # this is the resumed run
        uploads.add_not_uploaded(run)
    assert proxy.seen == []
    assert hub.repositories["user/name@main"].keys() == {"config.json", "model.safetensors", "UPLOADED.json"}


# ---------------------------------------------------------------- the command, and secrets


def run_push(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, typer\nfrom dsreason.cli.push import push\nfrom dsreason.errors import DsReasonError\n"
        "from dsreason.files import retries\nretries.FIRST_WAIT_S = 0.01\n"
        "try:\n    typer.run(push)\nexcept DsReasonError as error:\n"
        "    sys.stderr.write(f'error: {error}'); sys.exit(error.exit_code)\n"
    )
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_push_command_hides_secrets(server: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3FS_LOGGING_LEVEL", "DEBUG")
    folder = make_export(tmp_path / "model")
    proxy.faults = [ServerFault("PUT", "503 SlowDown", "config.json")]
    done = run_push(folder, "--to", "s3://bucket/run")
    assert (done.returncode, f"done: {EXPORT_BYTES} bytes sent" in done.stderr) == (0, True), done.stderr
    assert "503 SlowDown (said the test); retrying in" in done.stderr
    proxy.faults = [ServerFault("PUT", "403 AccessDenied")] * 5
    refused = run_push(folder, "--to", "s3://bucket/other")
    assert refused.returncode == 1
    assert "error: s3://bucket/other/config.json: the server responds with 403 AccessDenied" in refused.stderr
    for displayed in (done.stdout, done.stderr, refused.stdout, refused.stderr):
        assert "Traceback" not in displayed
        for secret in (KEY, SECRET, "Signature="):
            assert secret not in displayed


# ---------------------------------------------------------------- a whole run

RUN = """
[model]
path = "{model}"
[data]
adapter = "talkative.py"
path = "{rows}"
workers = 0
vision.fps = 4.0
[train]
max_steps = 2
epochs = 2
global_batch_size = 4
precision = "fp32"
[validation]
before_training = false
[checkpoint]
every = 1
upload = "s3://bucket/run"
upload_what = "all"
"""
VERBOSE_LOGGERS = """
import logging, os, threading
from data_adapters.jsonl import to_sample as plain

def crash():
    raise RuntimeError("with " + os.environ["WANDB_API_KEY"])

def to_sample(row):
    logging.getLogger("talkative").warning("with %s", os.environ["REMOTE_REWARD_TOKEN"])
    if row["id"] == "0":
        threading.Thread(target=crash).start()
    return plain(row)
"""
TOKENS = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "sentinelWandb",
    "REMOTE_REWARD_TOKEN": "sentinelReward",
    "WFM_REWARD_TOKEN": "sentinelWfm",
    "AWS_SESSION_TOKEN": "sentinelSession",
}
SECRETS = (KEY, SECRET, *TOKENS.values())


@pytest.fixture
def job(tiny_qwen2_5_vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prepare a run of two steps, with secret tokens in the environment, on the command line, in a log line and in a
    traceback."""
    rows = write_mixed_rows(tmp_path / "data")
    (tmp_path / "run.toml").write_text(RUN.format(model=tiny_qwen2_5_vl, rows=rows))
    (tmp_path / "talkative.py").write_text(VERBOSE_LOGGERS)
    for name, token in TOKENS.items():
        monkeypatch.setenv(name, token)
    command = ["sft", "--config", "run.toml", "--output-dir", "D", "--nproc", "1", "--resume", "auto"]
    return [*command, "--set", f"monitor.wandb_name={TOKENS['WFM_REWARD_TOKEN']}"]


def second_job(first: subprocess.Popen[str], job: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the same job again while the first one, whose ranks are suspended, still locks the folder."""
    while not (folder / "D" / ".lock").exists() and first.poll() is None:
        time.sleep(0.05)
    assert first.poll() is None, first.communicate()
    ranks = psutil.Process(first.pid).children()
    for rank in ranks:
        rank.suspend()
    ended = dsreason(*job, cwd=folder)
    for rank in ranks:
        rank.resume()
    return ended


@pytest.mark.long
def test_run_survives_failed_uploads_and_hides_secrets(
    server: Any, proxy: Proxy, tmp_path: Path, job: list[str]
) -> None:
    proxy.says = f"{KEY} and {SECRET} may not"
    proxy.faults = [ServerFault("PUT", "403 AccessDenied", kind) for kind in ("/checkpoints/", "/export/")] * 50
    command = [*COMMAND, *job]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    refused = second_job(first, job, tmp_path)
    stdout, stderr = first.communicate(timeout=600)
    assert first.returncode == 1, stderr
    assert (
        "error: 3 of this run's folders could not be uploaded to s3://bucket/run; the files on disk are complete"
        in stderr
    )
    assert "dsreason push D/export/final --to s3://bucket/run/export/final" in stderr
    assert (tmp_path / "D/checkpoints/step_2/COMPLETE").exists()
    assert (tmp_path / "D/export/final/model.safetensors").exists()

    assert refused.returncode == 2, refused.stderr
    assert "D: is in use by process " in refused.stderr and f" on {socket.gethostname()} (since " in refused.stderr

    written = b"".join(files_of(tmp_path / "D").values()).decode(errors="replace")
    assert "talkative: with <REMOTE_REWARD_TOKEN>" in written
    assert "RuntimeError: with <WANDB_API_KEY>" in written and "RuntimeError: with <WANDB_API_KEY>" in stderr
    assert "monitor.wandb_name=<WFM_REWARD_TOKEN>" in written
    for message in (refused.stdout, refused.stderr, stdout, stderr, written):
        assert [secret for secret in SECRETS if secret in message] == []

    proxy.faults = []
    pushed = dsreason("push", "D", "--to", "s3://bucket/run", cwd=tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    markers = {"checkpoints/step_1/COMPLETE", "checkpoints/step_2/COMPLETE", "export/final/UPLOADED.json"}
    assert {f"run/{name}" for name in markers} <= objects(server).keys()
