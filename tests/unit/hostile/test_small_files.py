"""Locks, markers and state files that are not regular files or not text: each is refused by name, and no read hangs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from dsreason.builtin_task import clips as builtin_clips
from dsreason.checkpoints.checkpoint_folder import find_complete_checkpoints, read_state
from dsreason.checkpoints.marker import MARKER, STATE_FILE, check_sizes
from dsreason.config.output import check_output_dir, find_run_record, read_run_config
from dsreason.config.schema import SFTConfig
from dsreason.errors import CheckpointError, ConfigError, DataError, DsReasonError
from dsreason.evaluation.report import results
from dsreason.files import disk, lock
from dsreason.files.disk import read_json_object, read_small
from dsreason.files.lock import FolderLock, check_not_in_use
from dsreason.models.folder import find_folder
from dsreason.monitor.sinks.json_lines import JSONLines
from dsreason.tools.datasets import remote_tar
from dsreason.train.dpo import reference
from dsreason.world.evaluation import results as world_results
from dsreason.world.evaluation.history import read_metrics
from dsreason.world.families import components
from tests.unit.hostile.guard import guarded, refused

Put = Callable[[Path], object]


def fifo(place: Path) -> None:
    os.mkfifo(place)


def folder(place: Path) -> None:
    place.mkdir()


def device(place: Path) -> None:
    place.symlink_to("/dev/zero")


def terminal(place: Path) -> None:
    place.symlink_to("/dev/tty")


def listening(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place))


def other_bytes(place: Path) -> None:
    place.write_bytes(b"\xff\xfe\x00{}")


def circle(place: Path) -> None:
    place.symlink_to(place.name)


def nothing(place: Path) -> None:
    place.symlink_to("gone")


ODD: list[Put] = [fifo, folder, device, terminal, listening, other_bytes, circle, nothing]


@pytest.fixture(params=ODD, ids=lambda put: put.__name__)
def put(request: pytest.FixtureRequest) -> Put:
    param: Put = request.param
    return param


def test_invalid_lock_is_rejected_by_name(put: Put, here: Path) -> None:
    put(here / ".lock")
    with (
        pytest.raises(ConfigError, match=r"\.lock: (is not a dsreason lock|cannot be written)"),
        FolderLock(pytest.fail) as folder_lock,
    ):
        folder_lock.take(here)
    with pytest.raises(ConfigError, match=r"\.lock: is not a dsreason lock"):
        check_not_in_use(here)


@pytest.mark.parametrize("name", ["checkpoints", "export", "logs", "tensorboard"])
def test_invalid_run_folder_is_rejected_before_loading(name: str, put: Put, here: Path) -> None:
    put(here / name)
    if put is not folder:
        with pytest.raises(ConfigError, match=f"{name} exists but is not a folder; remove it"):
            check_output_dir(here, SFTConfig(), "auto")


def test_invalid_checkpoint_state_is_rejected(put: Put, here: Path) -> None:
    put(here / STATE_FILE)
    with pytest.raises(CheckpointError, match=f"{STATE_FILE}: is not a valid checkpoint state"):
        read_state(here)


def test_invalid_marker_makes_no_checkpoint(put: Put, here: Path) -> None:
    checkpoint = here / "step_3"
    checkpoint.mkdir()
    put(checkpoint / MARKER)
    if put is not other_bytes:  # that is a file, whose content is read later
        assert find_complete_checkpoints(here) == []
    with pytest.raises(CheckpointError, match=MARKER):
        check_sizes(checkpoint)


def test_unreadable_run_note_counts_as_empty(put: Put, here: Path) -> None:
    put(here / "note.json")
    assert read_json_object(here / "note.json") == {}


@pytest.mark.parametrize("put", [fifo, folder, device, listening], ids=lambda put: put.__name__)
def test_irregular_metrics_file_is_set_aside(put: Put, here: Path) -> None:
    put(here / "metrics.jsonl")
    guarded(lambda: JSONLines(here / "metrics.jsonl", resume_step=3).close())
    assert (here / "metrics.jsonl").read_text() == ""
    assert os.path.lexists(here / "metrics.jsonl.1.unusable")


@pytest.mark.parametrize("line", [b"[1]", b"3", b"{}", b'{"step": "1"}', b"\xff", b"[" * 100_000])
def test_invalid_metrics_line_is_skipped(line: bytes, here: Path) -> None:
    file = here / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "a": 2}\n' + line + b"\n")
    JSONLines(file, resume_step=1).close()
    assert file.read_text() == '{"step": 1, "a": 2}\n'


READ: dict[str, tuple[Callable[[Path], object], type[DsReasonError]]] = {
    "results of a clip": (results.read_file, DataError),
    "record of a run": (lambda place: read_run_config(place.parent), ConfigError),
    "clip of a world model": (world_results.read_clip, DataError),
    "component of a world model": (components.read_json, CheckpointError),
}


@pytest.mark.parametrize("name", READ)
def test_irregular_run_file_is_rejected(name: str, put: Put, here: Path) -> None:
    read, error = READ[name]
    put(here / "config.json")
    if name == "record of a run":
        assert guarded(lambda: find_run_record(here)) is None
    refused(lambda: read(here / "config.json"), error, "config.json: ")


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_irregular_model_file_is_rejected(file: str, put: Put, here: Path) -> None:
    put(here / file)
    if put is not other_bytes:  # that is a file, whose content is read later
        refused(lambda: found_folder(here), CheckpointError, f"{file}: cannot be read (")


def test_unused_files_in_model_folder_are_ignored(here: Path) -> None:
    (here / "rows.json").touch()
    os.truncate(here / "rows.json", 10 * 2**30)
    (here / "old.json").mkdir()
    for name in (
        "notes.txt",
        "consolidated.safetensors",
    ):  # such as a link to a file that was removed from the Hub's cache
        (here / name).symlink_to("gone")
    assert found_folder(here) == here


def test_oversized_model_file_is_rejected(here: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (here / name).touch()
        os.truncate(here / name, 10 * 2**30)
    refused(lambda: found_folder(here), CheckpointError, "tokenizer.json: has 10737418240 bytes")
    (here / "tokenizer.json").unlink()
    assert found_folder(here) == here


def found_folder(folder: Path) -> Path:
    return find_folder(str(folder), tiny=Path, fetch=Path, download=Path)


@pytest.mark.parametrize("line", [b"\xff", b"[" * 100_000, b"[1]", b"3", b'{"a": 1'])
def test_foreign_lines_are_skipped_or_rejected(line: bytes, here: Path) -> None:
    file = here / "step_3.jsonl"
    file.write_bytes('{"a": "\u2028"}\n'.encode() + line + b"\n")
    assert disk.read_valid_lines(file, TypeAdapter(dict[str, Any]))[0] == [{"a": "\u2028"}]
    refused(lambda: reference.read_lines(file, "correct it"), DataError, "step_3.jsonl, line 2: ")


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"{", b"[1]", b'{"version": 3}'])
def test_damaged_cache_files_are_rejected_or_ignored(content: bytes, here: Path) -> None:
    (here / "task.json").write_bytes(content)
    refused(lambda: builtin_clips.write_builtin(here, num_train=64), DataError, "contains ", "not the built-in task")
    assert remote_tar.read_index(here / "task.json", (9, "etag")) == remote_tar.Index((9, "etag"))


def test_page_is_written_despite_irregular_files(put: Put, here: Path) -> None:
    put(here / "metrics.jsonl")
    assert guarded(lambda: read_metrics(here)) == []


def test_oversized_small_file_is_rejected(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 10)
    (here / "note").write_text("x" * 11)
    with pytest.raises(OSError, match="is larger than the maximum of 10 bytes"):
        read_small(here / "note")


def test_running_job_survives_an_invalid_lock(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    with FolderLock(pytest.fail) as folder_lock:
        folder_lock.take(here)
        content = (here / ".lock").read_text()
        (here / ".lock").unlink()
        os.mkfifo(here / ".lock")
        folder_lock.over.wait(0.1)
        (here / ".lock").unlink()
        (here / ".lock").write_text(content)
    assert json.loads(content)["pid"] == os.getpid()
    assert not (here / ".lock").exists()
