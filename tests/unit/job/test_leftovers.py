"""Temporary files of killed processes, which are the only files that a later start deletes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsreason.job import launch, leftovers
from dsreason.job.leftovers import build_prefix, get_scope, make_temporary_folder, remove_leftovers

OWNER = """
import sys, time
from multiprocessing import shared_memory
from types import SimpleNamespace
import torch
from dsreason.job import launch, leftovers
from dsreason.rollout import vllm_process
folder = leftovers.make_temporary_folder()
open(folder.name + "/rank_0.json", "w").close()
launch.share_value("word", "value")
vllm_process.rename_tensor_files = __import__("contextlib").nullcontext
with vllm_process.rename_shared_memory(SimpleNamespace(device=torch.device("cpu"))):
    memory = shared_memory.SharedMemory(create=True, size=1)
print("ready", flush=True)
time.sleep(600)
"""
PIECES = 3
"""Number of leftovers: a folder, a file in shared memory, and a value that the launcher's children share."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process with temporary files whose parent is a separate launcher."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def list_files_of(pid: int, place: Path) -> list[Path]:
    folders = (place, Path("/dev/shm"), place / f"dsreason-{os.getuid()}")
    return [file for folder in folders for file in folder.glob(f"dsreason-*-{get_scope()}-{pid}-*")]


def test_files_of_killed_process_are_removed(owner: subprocess.Popen[str], place: Path) -> None:
    remove_leftovers()
    assert len(list_files_of(owner.pid, place)) == 2
    assert len(list_files_of(os.getpid(), place)) == 1  # the file of `share_value`, which belongs to the parent
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    remove_leftovers()
    assert list_files_of(owner.pid, place) == []
    assert len(list_files_of(os.getpid(), place)) == 1


def test_reused_process_id_is_distinguished(place: Path) -> None:
    prefix = build_prefix()
    (place / f"{prefix}mine").mkdir()
    old = place / prefix.replace(f"-{prefix.split('-')[-2]}-", "-1-") / "inner"
    old.mkdir(parents=True)
    remove_leftovers()
    assert [path.name for path in place.iterdir()] == [f"{prefix}mine"]


def test_files_of_invisible_parent_stay_a_day(place: Path) -> None:
    """The parent of a process that `docker exec` starts has the id 0."""
    file = place / f"{build_prefix(0)}value"
    file.touch()
    remove_leftovers()
    assert file.exists()
    os.utime(file, (time.time() - 25 * 3600,) * 2)
    remove_leftovers()
    assert not file.exists()


def test_links_and_foreign_files_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = place / "outside"
    (outside / "inner").mkdir(parents=True)
    dead = f"dsreason-{os.getuid()}-{get_scope()}-4194305-1-"  # beyond the largest process id
    (place / f"{dead}link").symlink_to(outside)
    (place / f"{dead}folder").mkdir()
    (place / f"{dead}folder" / "link").symlink_to(outside)
    stay = ["dsreason-abcdefgh", f"dsreason-{os.getuid()}-00000000-4194305-1-other_machine", "dsreason-notes.txt"]
    for name in stay:
        (place / name).mkdir()
    remove_leftovers()
    assert sorted(path.name for path in place.iterdir()) == sorted([*stay, "outside"])
    assert (outside / "inner").is_dir()
    (place / f"{dead}folder").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    remove_leftovers()
    assert (place / f"{dead}folder").is_dir()


def test_start_first_removes_leftovers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / f"dsreason-{os.getuid()}-{get_scope()}-4194305-1-x").mkdir()
    monkeypatch.setattr(launch, "_run_once", lambda *given: None)
    launch.start_ranks(lambda attempt: [], ranks=1, log_dir=place)
    assert list(place.iterdir()) == []


def test_temporary_folder_vanishes_at_its_end(place: Path) -> None:
    with make_temporary_folder() as folder:
        assert Path(folder).parent == place and Path(folder).name.startswith(build_prefix())
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("length", [30, 200])
def test_sockets_need_short_paths(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers.get_socket_folder.cache_clear()
    monkeypatch.setenv(leftovers.ERROR_DIR, "/" + "x" * (length - 1))
    assert (leftovers.get_socket_folder() is None) == (length > 67)
    leftovers.get_socket_folder.cache_clear()
