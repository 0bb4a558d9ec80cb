"""`dsreason push`: the folders that it uploads, and its errors. Real uploads: tests/integration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dsreason.cli.push import push
from dsreason.errors import CheckpointError, ConfigError, DsReasonError
from dsreason.monitor.progress import Advance
from dsreason.storage import storage
from dsreason.storage.package import Package, Sent
from tests.unit.checkpoints.made_folders import EXPORT_BYTES, make_checkpoint, make_export


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    result: list[tuple[str, str]] = []

    def upload(package: Package, target: object, advance: Advance = lambda count: None) -> Sent:
        result.append((package.name, str(target)))
        advance(package.num_bytes)
        return Sent(1, 7)

    monkeypatch.setattr(storage, "upload", upload)
    return result


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(push)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("make", "num_bytes"), [(make_checkpoint, 9), (make_export, EXPORT_BYTES)])
def test_single_folder_is_uploaded_to_the_target(
    tmp_path: Path, sent: list[tuple[str, str]], make: Callable[[Path], Path], num_bytes: int
) -> None:
    folder = make(tmp_path / "somewhere" / "model")
    ended = call(folder, "--to", "s3://bucket/a/")
    assert ended.exit_code == 0, ended.output
    assert sent == [("somewhere/model", "s3://bucket/a")]
    assert f"{folder} (2 files, {num_bytes} bytes) → s3://bucket/a" in ended.stderr
    assert "done: 7 bytes sent, 1 of 2 files already existed" in ended.stderr


def test_run_uploads_only_complete_folders(tmp_path: Path, sent: list[tuple[str, str]]) -> None:
    make_checkpoint(tmp_path / "checkpoints" / "step_2")
    make_export(tmp_path / "export" / "final")
    (tmp_path / "checkpoints" / "step_3").mkdir()
    ended = call(tmp_path, "--to", "hub:user/name")
    assert ended.exit_code == 0, ended.output
    assert sent == [("checkpoints/step_2", "hub:user/name/checkpoints/step_2"), ("export/final", "hub:user/name")]
    assert f"skipped, because it is incomplete: {tmp_path / 'checkpoints' / 'step_3'}" in ended.stderr


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ((), ["checkpoints/step_2", "export/final"]),
        (("export",), ["export/final"]),
        (("logs", "export"), ["export/final", "logs"]),
    ],
)
def test_include_selects_which_kinds_are_uploaded(
    tmp_path: Path, sent: list[tuple[str, str]], include: tuple[str, ...], expected: list[str]
) -> None:
    make_checkpoint(tmp_path / "checkpoints" / "step_2")
    make_export(tmp_path / "export" / "final")
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    ended = call(tmp_path, "--to", "s3://bucket/run", *(f"--include={kind}" for kind in include))
    assert ended.exit_code == 0, ended.output
    assert [name for name, _ in sent] == expected
    assert [target for _, target in sent] == [f"s3://bucket/run/{name}" for name in expected]


def test_logs_folder_can_be_pushed(tmp_path: Path, sent: list[tuple[str, str]]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("step 1")
    (tmp_path / "metrics.jsonl").write_text("{}")
    ended = call(tmp_path / "logs", "--to", "s3://bucket/run/logs")
    assert ended.exit_code == 0, ended.output
    assert sent == [("logs", "s3://bucket/run/logs")]
    assert f"{tmp_path / 'logs'} (2 files, 8 bytes) → s3://bucket/run/logs" in ended.stderr


def test_logs_can_be_pushed_before_any_checkpoint(tmp_path: Path, sent: list[tuple[str, str]]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    ended = call(tmp_path, "--to", "s3://bucket/run", "--include", "logs")
    assert ended.exit_code == 0, ended.output
    assert sent == [("logs", "s3://bucket/run/logs")]
    ended = call(tmp_path, "--to", "s3://bucket/run")
    assert "the run has no complete checkpoint and no export yet" in str(ended.exception)


def test_pushing_missing_logs_is_rejected(tmp_path: Path, sent: list[tuple[str, str]]) -> None:
    make_export(tmp_path / "export" / "final")
    (tmp_path / "metrics.jsonl").write_text("{}")
    ended = call(tmp_path, "--to", "s3://bucket/run", "--include", "logs")
    assert isinstance(ended.exception, CheckpointError)
    assert "the run has no logs yet" in str(ended.exception)


def test_damaged_checkpoint_blocks_the_upload(tmp_path: Path, sent: list[tuple[str, str]]) -> None:
    make_checkpoint(tmp_path / "checkpoints" / "step_1")
    (make_checkpoint(tmp_path / "checkpoints" / "step_2") / "weights.pt").write_text("half")
    ended = call(tmp_path, "--to", "s3://bucket")
    assert isinstance(ended.exception, CheckpointError)
    assert sent == []


@pytest.mark.parametrize(
    ("prepare", "to", "error", "message"),
    [
        (make_export, "bucket/a/b", ConfigError, "--to: 'bucket/a/b' is not a valid upload target"),
        (make_export, "s3://key:sentinel@bucket", ConfigError, "--to: s3://…@…: an S3 URI must not contain keys"),
        (lambda folder: None, "s3://bucket", ConfigError, "the folder does not exist"),
        (Path.mkdir, "s3://bucket", ConfigError, "is neither an export"),
        (
            lambda folder: (make_checkpoint(folder) / "COMPLETE").unlink(),
            "s3://bucket",
            CheckpointError,
            "COMPLETE is missing",
        ),
        (
            lambda folder: (folder / "checkpoints").mkdir(parents=True),
            "s3://bucket",
            CheckpointError,
            "no complete checkpoint",
        ),
    ],
)
def test_invalid_push_is_a_usage_error(
    tmp_path: Path,
    sent: list[tuple[str, str]],
    prepare: Callable[[Path], object],
    to: str,
    error: type[DsReasonError],
    message: str,
) -> None:
    prepare(tmp_path / "model")
    ended = call(tmp_path / "model", "--to", to)
    assert isinstance(ended.exception, error)
    assert ended.exception.exit_code == 2
    assert message in str(ended.exception)
    assert "sentinel" not in str(ended.exception)
    assert sent == []
