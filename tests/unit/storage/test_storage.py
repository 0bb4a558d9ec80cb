"""Packages, retries, and the uploads of a run. Tests with S3 and the Hub: tests/integration."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from dsreason.config.schema_checkpoint import CheckpointConfig
from dsreason.errors import CheckpointError, ConfigError, Stopped, StorageError
from dsreason.files import retries
from dsreason.files.address import HubAddress, S3Address, UploadAddress, parse_target
from dsreason.files.disk import read_json_object
from dsreason.files.retries import run_with_retries
from dsreason.job import watchdog
from dsreason.job.failures import CRASH_LOG
from dsreason.monitor import progress
from dsreason.monitor.progress import Advance
from dsreason.storage import uploads
from dsreason.storage.package import (
    Package,
    Sent,
    list_finished,
    list_unfinished,
    open_package,
    open_package_or_logs,
)
from dsreason.storage.storage import get_folder_target, read_target
from dsreason.storage.storage_s3 import make_etag_check
from dsreason.storage.uploads import Uploader, open_uploads
from tests.unit.checkpoints.made_folders import EXPORT_BYTES, make_checkpoint, make_export

TARGET = S3Address("bucket", "run")
MD5_OF_A = "0cc175b9c0f1b6a831c399e269772661"

# Contents of packages


def test_checkpoint_package_holds_files_of_marker(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoints" / "step_4")
    (folder / "universal").mkdir()
    (folder / "universal" / "made_later").write_text("x")
    package = open_package(folder)
    assert package.files == {"trainer_state.json": 2, "weights.pt": 7}
    assert (package.name, package.marker, package.num_bytes) == ("checkpoints/step_4", "COMPLETE", 9)
    assert package.build_marker({}) == (folder / "COMPLETE").read_bytes()


def test_export_manifest_has_sizes_and_checksums(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "export" / "final")
    (folder / "UPLOADED.json").write_text("of a download")
    package = open_package(folder)
    assert package.files == {"config.json": 2, "model.safetensors": EXPORT_BYTES - 2}
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in package.files}
    assert json.loads(package.build_marker(sums)) == {
        "files": {name: {"size": package.files[name], "sha256": sums[name]} for name in package.files}
    }


@pytest.mark.parametrize("make", [make_export, make_checkpoint])
def test_marker_is_not_built_if_files_were_replaced(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "final")
    package = open_package(folder)
    make(tmp_path / "newer")
    last = max(package.files)
    (tmp_path / "newer" / last).rename(folder / last)
    with pytest.raises(StorageError, match=rf"{last}: was changed during the upload; upload the folder again"):
        package.build_marker(dict.fromkeys(package.files, ""))


@pytest.mark.parametrize(("make", "name"), [(make_export, "config.json"), (make_checkpoint, "COMPLETE")])
def test_marker_is_refused_for_deleted_files(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    folder = make(tmp_path / "final")
    package = open_package(folder)
    (folder / name).unlink()
    with pytest.raises(StorageError, match=rf"{name}: was changed during the upload; upload the folder again"):
        package.build_marker(dict.fromkeys(package.files, ""))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "COMPLETE").unlink(), "is not a complete checkpoint (COMPLETE is missing)"),
        (lambda folder: (folder / "weights.pt").unlink(), "weights.pt: is missing"),
        (lambda folder: (folder / "weights.pt").write_text("half"), "weights.pt: has 4 bytes, but COMPLETE lists 7"),
        (lambda folder: (folder / "COMPLETE").write_text("{}"), "COMPLETE: does not list the checkpoint's files"),
    ],
)
def test_incomplete_checkpoint_is_refused(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    folder = make_checkpoint(tmp_path / "checkpoints" / "step_4")
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        open_package(folder)
    assert message in str(caught.value)


def test_export_with_missing_shard_is_rejected(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "final")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        open_package(folder)


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ({"files": {"../secret.txt": 6}}, "COMPLETE: lists '../secret.txt', which is outside the checkpoint folder"),
        ({"files": {"{tmp}/secret.txt": 6}}, "/secret.txt', which is outside the checkpoint folder"),
        ({"files": ["weights.pt"]}, "COMPLETE: does not list the checkpoint's files"),
        ({"files": {"n" * 5000: 6}}, "nnn: is missing"),
        ({"files": {"weights.pt": "7"}}, "weights.pt: has 7 bytes, but COMPLETE lists '7'"),
        (["weights.pt"], "COMPLETE: must be a JSON object; got a list"),
        (NESTED, "COMPLETE: cannot be read"),
        ('{"files": ' + NESTED, "COMPLETE: cannot be read"),
    ],
    ids=["above", "absolute", "a list", "a long name", "a text", "no object", "nested", "nested files"],
)
def test_unsafe_or_damaged_marker_is_rejected(tmp_path: Path, marker: object, message: str) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    folder = make_checkpoint(tmp_path / "checkpoints" / "step_4")
    (tmp_path / "checkpoints" / "secret.txt").write_text("secret")
    text = marker if isinstance(marker, str) else json.dumps(marker).replace("{tmp}", str(tmp_path))
    (folder / "COMPLETE").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        open_package(folder)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must be a JSON object; got a list"),
        (NESTED, "cannot be read"),
        ('{"weight_map": ' + NESTED, "cannot be read"),
        ("{}", "weight_map must map tensors to files; got None"),
        ('{"weight_map": 3}', "weight_map must map tensors to files; got 3"),
        ('{"weight_map": {"a": 3}}', "weight_map must map tensors to files; got {'a': 3}"),
        ('{"weight_map": {"a": ["b"]}}', "weight_map must map tensors to files; got {'a': ['b']}"),
        (b"\xff", "cannot be read"),
    ],
)
def test_export_with_damaged_index_is_rejected(tmp_path: Path, index: str | bytes, message: str) -> None:
    folder = make_export(tmp_path / "final")
    (folder / "model.safetensors.index.json").write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(CheckpointError) as caught:
        open_package(folder)
    assert str(caught.value).startswith(f"{folder}/model.safetensors.index.json: {message}")
    assert str(caught.value).endswith("; export the model again")


@pytest.mark.parametrize("left", [0, 7, EXPORT_BYTES - 3])
def test_export_with_truncated_weights_is_rejected(tmp_path: Path, left: int) -> None:
    folder = make_export(tmp_path / "export" / "final")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(
        CheckpointError,
        match=r"final/model\.safetensors is truncated, damaged or a Git LFS pointer \(.*; download or export the model",
    ):
        open_package(folder)


@pytest.mark.parametrize("make", [make_export, make_checkpoint])
@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", "weights.pt", "COMPLETE"])
@pytest.mark.parametrize("target", ["{tmp}/secret.txt", "{tmp}", "{tmp}/absent", "/proc/self/environ"])
def test_link_out_of_folder_is_rejected(tmp_path: Path, make: Callable[[Path], Path], name: str, target: str) -> None:
    (tmp_path / "secret.txt").write_text("secret!")
    folder = make(tmp_path / "checkpoints" / "step_4")
    (folder / "sub").mkdir()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target.format(tmp=tmp_path))
    with pytest.raises(CheckpointError) as caught:
        open_package(folder)
    assert f"{name}: " in str(caught.value)


def test_links_inside_and_to_folder_are_followed(tmp_path: Path) -> None:
    folder = make_export(tmp_path / "blobs" / "final")
    (folder / "again.json").symlink_to("config.json")
    (folder / "loop").symlink_to("loop")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "final").symlink_to(folder)
    package = open_package(tmp_path / "export" / "final")
    assert package.files == {"again.json": 2, "config.json": 2, "model.safetensors": EXPORT_BYTES - 2}


def test_folder_without_export_or_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither an export"):
        open_package(tmp_path)
    with pytest.raises(ConfigError, match="the folder does not exist"):
        open_package(tmp_path / "nothing")


def test_finished_folders_are_ordered_and_unfinished_separate(tmp_path: Path) -> None:
    for step in (10, 9):
        make_checkpoint(tmp_path / "checkpoints" / f"step_{step}")
        make_export(tmp_path / "export" / f"step_{step}")
    make_export(tmp_path / "export" / "final")
    make_export(tmp_path / "export" / ".step_11.partial")
    (tmp_path / "checkpoints" / ".saving_step_11").mkdir()
    (tmp_path / "checkpoints" / "step_12").mkdir()
    names = [str(folder.relative_to(tmp_path)) for folder in list_finished(tmp_path)]
    assert names == [
        *("checkpoints/step_9", "checkpoints/step_10"),
        *("export/step_9", "export/step_10", "export/final"),
    ]
    assert [folder.name for folder in list_unfinished(tmp_path)] == [".saving_step_11", "step_12"]


def test_final_export_goes_to_repository_root() -> None:
    hub = HubAddress("user/name", "", "dev")
    assert get_folder_target(hub, "export/final") == hub
    assert str(get_folder_target(hub, "export/step_4")) == "hub:user/name/export/step_4@dev"
    assert str(get_folder_target(TARGET, "export/final")) == "s3://bucket/run/export/final"


def test_invalid_target_error_names_the_option() -> None:
    with pytest.raises(ConfigError, match="^--to: 'folder' is not a valid upload target"):
        read_target("folder", "--to")


@pytest.mark.parametrize(
    "answer",
    [
        {"ETag": f'"{MD5_OF_A}"'},
        {"ETag": '"of-another-server"'},
        {"ETag": f'"{"0" * 32}"', "ServerSideEncryption": "aws:kms"},
        {"ETag": f'"{"0" * 32}"', "SSECustomerAlgorithm": "AES256"},
        {"ETag": f'"{"0" * 32}-1"'},
    ],
    ids=["equal", "no MD5", "encrypted by KMS", "encrypted by the customer", "uploaded in parts by the server"],
)
def test_equal_or_uninformative_etag_is_accepted(answer: dict[str, str]) -> None:
    make_etag_check(TARGET, MD5_OF_A)(answer)


def test_etag_of_other_bytes_is_transient_error() -> None:
    with pytest.raises(StorageError, match="was corrupted in transit") as caught:
        make_etag_check(TARGET, MD5_OF_A)({"ETag": f'"{"0" * 32}"', "ServerSideEncryption": "AES256"})
    assert caught.value.transient


# Retries


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    result: list[float] = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(sleep=result.append))  # threads of other tests also sleep
    return result


def failing(times: int, error: StorageError) -> Callable[[], str]:
    remaining = iter([error] * times)

    def action() -> str:
        if (second := next(remaining, None)) is not None:
            raise second
        return "done"

    return action


def test_transient_error_is_retried_with_doubling_waits(waits: list[float]) -> None:
    assert run_with_retries(failing(5, StorageError("busy", transient=True))) == "done"
    assert all(top / 2 <= wait <= top for wait, top in zip(waits, [1, 2, 4, 8, 16], strict=True))


def test_persistent_transient_error_is_raised_after_retries(waits: list[float]) -> None:
    with pytest.raises(StorageError, match="busy"):
        run_with_retries(failing(6, StorageError("busy", transient=True)))
    assert len(waits) == 5


def test_permanent_error_is_raised_at_once(waits: list[float]) -> None:
    with pytest.raises(StorageError, match="denied"):
        run_with_retries(failing(1, StorageError("denied")))
    assert waits == []


# Uploads of a run


class FakeStorage:
    """A storage that records uploads; `gate` delays them, and `errors` are raised one after another."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.errors: list[Exception] = []
        self.gate = Event()
        self.started = Event()
        self.arrived = Event()
        self.gate.set()

    def upload(self, package: Package, target: object, advance: Advance) -> Sent:
        self.started.set()
        assert self.gate.wait(10)
        if self.errors:
            raise self.errors.pop(0)
        self.sent.append(str(target))
        self.arrived.set()
        return Sent(len(package.files), package.num_bytes)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> FakeStorage:
    fake = FakeStorage()
    monkeypatch.setattr(uploads, "upload", fake.upload)
    return fake


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        make_checkpoint(tmp_path / "checkpoints" / f"step_{step}")
    make_export(tmp_path / "export" / "final")
    return tmp_path


EVERYTHING = ("export", "checkpoint")


def test_only_last_is_uploaded_by_default(run: Path, storage: FakeStorage) -> None:
    for subject, expected in (("final", ["step_2"]), ("all", ["step_1", "step_2"])):
        storage.sent.clear()
        uploader = Uploader(TARGET / subject, what=subject, include=EVERYTHING)
        uploader.add(run / "checkpoints" / "step_1", last=False)
        uploader.add(run / "checkpoints" / "step_2", last=True)
        uploader.finish()
        assert storage.sent == [f"{TARGET}/{subject}/checkpoints/{name}" for name in expected]


def test_only_included_kinds_are_uploaded(run: Path, storage: FakeStorage) -> None:
    uploader = Uploader(TARGET, include=("export",))
    uploader.add(run / "checkpoints" / "step_2", last=True)
    uploader.add(run / "export" / "final", last=True)
    uploader.finish()
    assert storage.sent == [f"{TARGET}/export/final"]


def test_pending_folders_are_in_use_without_blocking(run: Path, storage: FakeStorage) -> None:
    storage.gate.clear()
    uploader = Uploader(TARGET, what="all", include=EVERYTHING)
    first, second = run / "checkpoints" / "step_1", run / "checkpoints" / "step_2"
    for folder in (first, second, second):
        uploader.add(folder, last=False)
    assert storage.started.wait(10)
    assert uploader.list_in_use() == {first, second}
    assert storage.sent == []
    storage.gate.set()
    uploader.finish()
    assert uploader.list_in_use() == set()
    assert storage.sent == [f"{TARGET}/checkpoints/step_1", f"{TARGET}/checkpoints/step_2"]


def test_failed_upload_is_logged_and_retried_later(
    run: Path, storage: FakeStorage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.errors = [StorageError("s3://bucket: the server responds with 503")]
    uploader = Uploader(TARGET, what="all", include=EVERYTHING)
    uploader.add(run / "checkpoints" / "step_1", last=False)
    uploader.add(run / "checkpoints" / "step_2", last=False)
    uploader.finish()
    assert storage.sent == [f"{TARGET}/checkpoints/step_2", f"{TARGET}/checkpoints/step_1"]
    assert (
        "step_1 was not uploaded: s3://bucket: the server responds with 503; the upload will be retried" in caplog.text
    )


def test_failed_upload_is_retried_with_next_folder(run: Path, storage: FakeStorage) -> None:
    storage.errors = [StorageError("busy"), StorageError("busy")]
    uploader = Uploader(TARGET, what="all", include=EVERYTHING)
    first, second = run / "checkpoints" / "step_1", run / "checkpoints" / "step_2"
    uploader.add(first, last=False)
    while uploader.describe_missing().count("busy") == 0:
        time.sleep(0.01)
    uploader.add(second, last=True)  # also fails once
    while storage.sent != [f"{TARGET}/checkpoints/step_1"]:
        time.sleep(0.01)
    uploader.finish()
    assert storage.sent == [f"{TARGET}/checkpoints/step_1", f"{TARGET}/checkpoints/step_2"]


def test_upload_is_skipped_until_folder_changes(run: Path, storage: FakeStorage) -> None:
    export = run / "export" / "final"

    def upload_twice() -> int:
        storage.sent.clear()
        uploader = Uploader(TARGET, include=EVERYTHING)
        uploader.add(export, last=True)
        uploader.add(export, last=True)
        uploader.finish()
        uploader.add(export, last=True)
        uploader.finish()
        return len(storage.sent)

    assert upload_twice() == 1
    assert upload_twice() == 0  # as in a later job
    later = (export / "config.json").stat().st_mtime_ns + 10**9
    os.utime(export / "config.json", ns=(later, later))
    assert upload_twice() == 1


def test_job_remembers_uploads_when_record_unwritable(run: Path, storage: FakeStorage) -> None:
    (run / uploads.RECORD).mkdir()
    uploader = Uploader(TARGET, include=EVERYTHING)
    for _ in range(2):
        uploader.add(run / "export" / "final", last=True)
        uploader.finish()
    assert storage.sent == [f"{TARGET}/export/final"]


def test_folder_rewritten_during_upload_is_uploaded_again(run: Path, storage: FakeStorage) -> None:
    storage.gate.clear()
    uploader, export = Uploader(TARGET, what="all"), run / "export" / "final"
    uploader.add(export, last=False)
    assert storage.started.wait(10)
    later = (export / "config.json").stat().st_mtime_ns + 10**9
    os.utime(export / "config.json", ns=(later, later))
    uploader.add(export, last=True)
    storage.gate.set()
    uploader.finish()
    assert storage.sent == [f"{TARGET}/export/final"] * 2


def test_resumed_run_uploads_missing_folders(run: Path, storage: FakeStorage) -> None:
    killed = Uploader(TARGET, what="all", include=("checkpoint",))
    killed.add(run / "checkpoints" / "step_1", last=False)
    killed.finish()
    make_checkpoint(run / "checkpoints" / ".saving_step_3")
    for subject, expected in (("final", []), ("all", [f"{TARGET}/checkpoints/step_2"])):
        storage.sent.clear()
        resumed = Uploader(TARGET, what=subject, include=("checkpoint",))
        resumed.add_not_uploaded(run)
        resumed.finish()
        assert storage.sent == expected


def test_failed_upload_error_shows_push_command(run: Path, storage: FakeStorage) -> None:
    storage.errors = [StorageError("denied"), RuntimeError("a bug"), StorageError("denied"), RuntimeError("a bug")]
    uploader = Uploader(TARGET, include=EVERYTHING)
    checkpoint_folder, export = run / "checkpoints" / "step_2", run / "export" / "final"
    storage.gate.clear()
    uploader.add(checkpoint_folder, last=True)
    uploader.add(export, last=True)
    storage.gate.set()
    with pytest.raises(StorageError) as caught:
        uploader.finish()
    assert str(caught.value).splitlines() == [
        "2 of this run's folders could not be uploaded to s3://bucket/run; the files on disk are complete",
        f"  {checkpoint_folder}: denied",
        f"    to upload it: dsreason push {checkpoint_folder} --to s3://bucket/run/checkpoints/step_2",
        f"  {export}: RuntimeError: a bug",
        f"    to upload it: dsreason push {export} --to s3://bucket/run/export/final",
    ]
    assert caught.value.exit_code == 1


def config(**values: object) -> CheckpointConfig:
    return CheckpointConfig(upload="s3://bucket/run", **values)  # type: ignore[arg-type]


def test_context_waits_for_uploads_on_exit(run: Path, storage: FakeStorage) -> None:
    with open_uploads(config()) as uploader:
        uploader.add(run / "export" / "final", last=True)
    assert storage.sent == [f"{TARGET}/export/final"]


def test_stop_request_ends_waiting_and_names_missing(run: Path, storage: FakeStorage) -> None:
    export, requested = run / "export" / "final", iter(["", "", "SIGTERM"])
    storage.gate.clear()
    with (
        pytest.raises(Stopped, match="^stopped by SIGTERM before all uploads had finished; 1 of") as caught,
        open_uploads(config(), lambda: next(requested, "SIGTERM")) as uploader,
    ):
        uploader.add(export, last=True)
    storage.gate.set()
    assert f"to upload it: dsreason push {export} --to s3://bucket/run/export/final" in str(caught.value)
    uploader.finish()
    with open_uploads(config(), lambda: "SIGTERM") as uploader:
        uploader.add(export, last=True)  # the export now exists
    assert storage.sent == [f"{TARGET}/export/final"]


def test_failing_run_does_not_wait_for_uploads(
    run: Path, storage: FakeStorage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.gate.clear()
    with pytest.raises(ZeroDivisionError), open_uploads(config()) as uploader:
        uploader.add(run / "export" / "final", last=True)
        raise ZeroDivisionError
    assert f"dsreason push {run / 'export' / 'final'} --to s3://bucket/run/export/final" in caplog.text
    storage.gate.set()
    uploader.finish()


@pytest.mark.parametrize("rank", ["1", None])
def test_only_rank_0_with_target_uploads(
    run: Path, storage: FakeStorage, monkeypatch: pytest.MonkeyPatch, rank: str | None
) -> None:
    if rank is not None:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    with open_uploads(config() if rank else CheckpointConfig()) as uploader:
        uploader.add(run / "export" / "final", last=True)
        assert uploader.list_in_use() == set()
    assert storage.sent == []


# Several targets


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A dict that records the targets of all uploads, by kind of storage."""
    result: dict[str, list[str]] = {"s3": [], "hub": []}

    def upload(package: Package, target: UploadAddress, advance: Advance) -> Sent:
        kind = "hub" if isinstance(target, HubAddress) else "s3"
        if "refuses" in str(target):
            raise StorageError(f"{target}: the server responds with 403")
        result[kind].append(str(target))
        return Sent(len(package.files), package.num_bytes)

    monkeypatch.setattr(uploads, "upload", upload)
    return result


def add_all(uploader: uploads.Uploads, run: Path) -> None:
    uploader.add(run / "checkpoints" / "step_1", last=False)
    uploader.add(run / "checkpoints" / "step_2", last=True)
    uploader.add(run / "export" / "final", last=True)


def test_s3_gets_everything_and_hub_final_export(run: Path, places: dict[str, list[str]]) -> None:
    config = CheckpointConfig(upload=("s3://bucket/outputs", "hub:user/name"))
    with open_uploads(config) as uploader:
        add_all(uploader, run)
    assert places == {
        "s3": ["s3://bucket/outputs/checkpoints/step_2", "s3://bucket/outputs/export/final"],
        "hub": ["hub:user/name"],
    }
    assert {target: sorted(names) for target, names in read_json_object(run / uploads.RECORD).items()} == {
        "s3://bucket/outputs": ["checkpoints/step_2", "export/final"],
        "hub:user/name": ["export/final"],
    }


def test_rejecting_target_does_not_block_another(run: Path, places: dict[str, list[str]]) -> None:
    config = CheckpointConfig(upload=("s3://refuses/a", "hub:user/name"), upload_what="all")
    with pytest.raises(StorageError) as caught, open_uploads(config) as uploader:
        add_all(uploader, run)
    assert places["hub"] == ["hub:user/name"]
    assert "3 of this run's folders could not be uploaded to s3://refuses/a; the files on disk are complete" in str(
        caught.value
    )
    assert "--to s3://refuses/a/checkpoints/step_2" in str(caught.value)
    assert "hub:user" not in str(caught.value)


def test_all_rejecting_targets_are_named(run: Path, places: dict[str, list[str]]) -> None:
    config = CheckpointConfig(upload=("s3://refuses/a", "hub:user/refuses"))
    with pytest.raises(StorageError) as caught, open_uploads(config) as uploader:
        add_all(uploader, run)
    heads = [line for line in str(caught.value).splitlines() if not line.startswith(" ")]
    assert heads == [
        "2 of this run's folders could not be uploaded to s3://refuses/a; the files on disk are complete",
        "1 of this run's folders could not be uploaded to hub:user/refuses; the files on disk are complete",
    ]


def test_folder_stays_in_use_for_pending_target(run: Path, places: dict[str, list[str]]) -> None:
    to_s3, to_hub = Uploader(TARGET, include=EVERYTHING), Uploader(HubAddress("user/refuses"))
    both = uploads.Uploads([to_s3, to_hub])
    add_all(both, run)
    with pytest.raises(StorageError):
        both.finish()
    assert both.list_in_use() == {run / "export" / "final"}
    assert to_s3.list_in_use() == set()


def test_resumed_run_retries_only_failed_target(run: Path, places: dict[str, list[str]]) -> None:
    for names in (("s3://bucket/a", "hub:user/refuses"), ("s3://bucket/a", "hub:user/name")):
        places["s3"].clear()
        config = CheckpointConfig(upload=names, upload_what="all", upload_include=("export",))
        try:
            with open_uploads(config) as uploader:
                uploader.add_not_uploaded(run)
        except StorageError as error:
            assert "hub:user/refuses" in str(error)
    assert places == {"s3": [], "hub": ["hub:user/name"]}


# Logs


@pytest.fixture
def logged(run: Path) -> Path:
    (run / "logs").mkdir()
    (run / "logs" / "rank_0.log").write_text("step 1\n")
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events").write_text("e")
    (run / "metrics.jsonl").write_text("{}\n")
    (run / "config.json").write_text("{}")
    return run


def test_logs_are_uploaded_once_more_at_end(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[str, dict[str, int]]] = []

    def upload(package: Package, target: object, advance: Advance) -> Sent:
        recorded.append((str(target), dict(package.files)))
        with (logged / "logs" / "rank_0.log").open("a") as file:  # uploads also write to the log
            file.write("uploaded\n")
        return Sent(1, 1)

    monkeypatch.setattr(uploads, "upload", upload)
    config = CheckpointConfig(upload="s3://bucket/run", upload_include=("export", "logs"))
    with open_uploads(config) as uploader:
        add_all(uploader, logged)
    targets = [target for target, _ in recorded]
    assert targets.count("s3://bucket/run/export/final") == 1
    assert set(targets) == {"s3://bucket/run/export/final", "s3://bucket/run/logs"}
    assert targets[-1] == "s3://bucket/run/logs"
    sizes = {"config.json": 2, "metrics.jsonl": 3, "tensorboard/events": 1}
    assert recorded[-1][1] == sizes | {"rank_0.log": len("step 1\n") + len("uploaded\n") * (len(recorded) - 1)}
    assert list(read_json_object(logged / uploads.RECORD)["s3://bucket/run"]) == ["export/final"]


def test_logs_upload_when_nothing_else_is_saved(logged: Path, places: dict[str, list[str]]) -> None:
    config = CheckpointConfig(upload="s3://bucket/run", upload_include=("logs",), export="none", last=False, every=0)
    with open_uploads(config) as uploader:
        uploader.add_not_uploaded(logged)  # as at the start of a run
    assert places["s3"] == ["s3://bucket/run/logs"]


@pytest.mark.parametrize("what", ["final", "all"])
@pytest.mark.parametrize("error", [ZeroDivisionError("of loss"), Stopped("stopped by SIGTERM"), KeyboardInterrupt()])
def test_logs_upload_when_run_fails_or_stops(
    logged: Path, places: dict[str, list[str]], caplog: pytest.LogCaptureFixture, what: str, error: BaseException
) -> None:
    config = CheckpointConfig(upload="s3://bucket/run", upload_include=("logs",), upload_what=what)
    with pytest.raises(type(error)), open_uploads(config) as uploader:
        uploader.add_not_uploaded(logged)
        while uploader.list_in_use():
            time.sleep(0.01)
        places["s3"].clear()
        raise error
    assert places["s3"] == ["s3://bucket/run/logs"]
    assert str(error) in next(item.getMessage() for item in caplog.records if item.name == CRASH_LOG)


def test_log_upload_failure_does_not_hide_error(
    logged: Path, storage: FakeStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploads, "LOGS_TIME_S", 0.05)
    storage.gate.clear()
    with pytest.raises(ZeroDivisionError), open_uploads(config(upload_include=("logs",))) as uploader:
        uploader.add_not_uploaded(logged)
        raise ZeroDivisionError
    assert f"dsreason push {logged / 'logs'} --to s3://bucket/run/logs" in caplog.text
    storage.gate.set()
    assert storage.arrived.wait(10)  # the abandoned upload must not take the error of the next one
    monkeypatch.setattr(uploads, "LOGS_TIME_S", 10.0)
    storage.errors = [StorageError("denied")]
    with pytest.raises(ZeroDivisionError), open_uploads(config(upload_include=("logs",))) as uploader:
        uploader.add_not_uploaded(logged)
        raise ZeroDivisionError
    assert "denied" in caplog.text


def test_log_upload_wait_is_below_watchdog_limit() -> None:
    assert uploads.LOGS_TIME_S < watchdog.CLOSING_TIME


def test_logs_not_uploaded_are_named_and_pushable(logged: Path, places: dict[str, list[str]]) -> None:
    config = CheckpointConfig(upload="s3://refuses/run", upload_include=("logs",))
    with pytest.raises(StorageError) as caught, open_uploads(config) as uploader:
        add_all(uploader, logged)
    assert f"dsreason push {logged / 'logs'} --to s3://refuses/run/logs" in str(caught.value)
    with open_package_or_logs(logged / "logs") as package:
        assert (package.name, package.marker) == ("logs", "UPLOADED.json")
        assert set(package.files) == {"config.json", "metrics.jsonl", "rank_0.log", "tensorboard/events"}
    assert not package.folder.exists()


def test_progress_is_logged_by_the_uploader(run: Path, storage: FakeStorage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dsreason"), open_uploads(config()) as uploader:
        uploader.add(run / "export" / "final", last=True)
    assert f"uploading {run / 'export' / 'final'} to s3://bucket/run/export/final: {EXPORT_BYTES} bytes" in caplog.text
    done = f"uploaded {run / 'export' / 'final'} to {parse_target('s3://bucket/run/export/final')}: {EXPORT_BYTES} bytes in "
    assert re.search(re.escape(done) + r"\d+ s, .+/s$", caplog.text, re.MULTILINE)


def test_progress_is_logged_every_30_seconds(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = 0

    def advance_slowly(package: Package, target: object, advance: Advance) -> Sent:
        nonlocal seconds
        for _ in range(9):
            seconds += 10
            advance(1)
        return Sent(1, 9)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: seconds))
    monkeypatch.setattr(uploads, "upload", advance_slowly)
    with caplog.at_level(logging.INFO, "dsreason"), open_uploads(config()) as uploader:
        uploader.add(run / "export" / "final", last=True)
    assert re.findall(r"final: (\d+ bytes of \d+ bytes)", caplog.text) == [
        f"{done} bytes of {EXPORT_BYTES} bytes" for done in (3, 6, 9)
    ]
