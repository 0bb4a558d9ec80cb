"""Locks, markers and state files of ours that are no files, or no text: each is refused by its name, and nothing hangs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dsreason.checkpoints.checkpoint_folder import MARKER, STATE_FILE, check_sizes, complete_checkpoints, read_state
from dsreason.errors import CheckpointError, ConfigError
from dsreason.files import disk, lock
from dsreason.files.disk import json_object, read_small
from dsreason.files.lock import FolderLock, check_not_in_use
from dsreason.monitor.metrics import StepLines, read_lines

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


ODD: list[Put] = [fifo, folder, device, terminal, listening, other_bytes, circle]


@pytest.fixture(params=ODD, ids=lambda put: put.__name__)
def put(request: pytest.FixtureRequest) -> Put:
    found: Put = request.param
    return found


def test_a_lock_that_is_none_is_refused_by_its_name(put: Put, here: Path) -> None:
    put(here / ".lock")
    with (
        pytest.raises(ConfigError, match=r"\.lock: (is no lock of ours|cannot be written)"),
        FolderLock(pytest.fail) as mine,
    ):
        mine.take(here)
    with pytest.raises(ConfigError, match=r"\.lock: is no lock of ours"):
        check_not_in_use(here)


def test_the_state_of_a_checkpoint_that_is_none_is_refused_by_its_name(put: Put, here: Path) -> None:
    put(here / STATE_FILE)
    with pytest.raises(CheckpointError, match=f"{STATE_FILE}: is not the state of a checkpoint"):
        read_state(here)


def test_a_marker_that_is_none_makes_no_checkpoint(put: Put, here: Path) -> None:
    checkpoint = here / "step_3"
    checkpoint.mkdir()
    put(checkpoint / MARKER)
    if put is not other_bytes:  # that is a file, whose content is read later
        assert complete_checkpoints(here) == []
    with pytest.raises(CheckpointError, match=MARKER):
        check_sizes(checkpoint)


def test_what_a_run_remembers_is_found_out_again_where_it_is_no_file(put: Put, here: Path) -> None:
    put(here / "note.json")
    assert json_object(here / "note.json") == {}


@pytest.mark.parametrize("put", [fifo, folder, device, listening], ids=lambda put: put.__name__)
def test_metrics_that_are_no_file_are_refused_by_their_name(put: Put, here: Path) -> None:
    put(here / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be continued \(is a "):
        read_lines(here / "metrics.jsonl", last_step=3)


@pytest.mark.parametrize("line", [b"[1]", b"3", b"{}", b'{"step": "1"}', b"\xff", b"[" * 100_000])
def test_a_line_of_metrics_that_is_no_step_is_left_out(line: bytes, here: Path) -> None:
    file = here / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "a": 2}\n' + line + b"\n")
    StepLines(file, resume_step=1).close()
    assert file.read_text() == '{"step": 1, "a": 2}\n'


def test_a_file_that_has_no_end_is_not_read_to_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOST_BYTES", 10)
    (here / "note").write_text("x" * 11)
    with pytest.raises(OSError, match="is larger than 10 bytes"):
        read_small(here / "note")


def test_a_lock_that_becomes_none_while_a_job_runs_does_not_end_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    with FolderLock(pytest.fail) as mine:
        mine.take(here)
        content = (here / ".lock").read_text()
        (here / ".lock").unlink()
        os.mkfifo(here / ".lock")
        mine.over.wait(0.1)
        (here / ".lock").unlink()
        (here / ".lock").write_text(content)
    assert json.loads(content)["pid"] == os.getpid()
    assert not (here / ".lock").exists()
