"""Locks that admit one job at a time to a folder: refused jobs, and locks that have become void."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Timer

import pytest

from dsreason.config.output import check_output_dir
from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError, Stopped
from dsreason.files import lock
from dsreason.files.lock import FolderLock, Holder, describe_process, read_start_time
from dsreason.stopping import forget_stop, request_stop


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_AFTER_S", 0.6)
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def holder_of(pid: int) -> Holder:
    return replace(describe_process(), pid=pid, started=read_start_time(pid) or "")


def write_lock(folder: Path, holder: Holder) -> Path:
    file = folder / ".lock"
    file.write_text(json.dumps(asdict(holder)))
    return file


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught, FolderLock(pytest.fail) as folder_lock:
        folder_lock.take(folder)
    return str(caught.value)


def test_folder_is_released_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with FolderLock(pytest.fail) as folder_lock:
            folder_lock.take(tmp_path)
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        assert list(tmp_path.iterdir()) == []


def test_running_holder_is_named_and_keeps_lock(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    file = write_lock(tmp_path, holder_of(other.pid))
    expected = f"{tmp_path}: is in use by process {other.pid} on {socket.gethostname()} (since "
    assert refused(tmp_path).startswith(expected)
    assert json.loads(file.read_text())["pid"] == other.pid
    with pytest.raises(ConfigError) as caught:
        check_output_dir(tmp_path, SFTConfig(), "auto")
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "its exit code is left"])
def test_lock_of_killed_process_is_void(tmp_path: Path, other: subprocess.Popen[bytes], reaped: bool) -> None:
    write_lock(tmp_path, holder_of(other.pid))
    os.kill(other.pid, signal.SIGKILL)
    if reaped:
        other.wait()
    while read_start_time(other.pid) is not None:
        time.sleep(0.01)
    check_output_dir(tmp_path, SFTConfig(), "auto")
    with FolderLock(pytest.fail) as folder_lock:
        folder_lock.take(tmp_path)
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_reused_process_id_holds_no_lock(tmp_path: Path) -> None:
    write_lock(tmp_path, replace(describe_process(), started="1"))
    with FolderLock(pytest.fail) as folder_lock:
        folder_lock.take(tmp_path)


LOCKS: dict[str, str | dict[str, object]] = {
    "of another machine": {"machine": "another"},
    "empty": "",
    "garbled": "{",
    "lists in lists": "[" * 200_000,
    **{f"process {pid!r:.9}": {"pid": pid} for pid in ("1\0", "\ud800", None, True, 1.5, -1, 10**400)},
    "of no process": {"pid": 99_999_999, "started": None},
}


@pytest.mark.parametrize("kind", LOCKS)
def test_untouched_lock_expires(tmp_path: Path, kind: str) -> None:
    file, content = tmp_path / ".lock", LOCKS[kind]
    file.write_text(content if isinstance(content, str) else json.dumps(asdict(describe_process()) | content))
    with FolderLock(pytest.fail) as folder_lock:
        folder_lock.take(tmp_path)
        assert json.loads(file.read_text()) == asdict(describe_process()) | {
            "since": json.loads(folder_lock.content)["since"]
        }


def test_stopped_job_does_not_wait_for_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_AFTER_S", 15)
    write_lock(tmp_path, replace(describe_process(), machine="another"))
    stopped = pytest.raises(
        Stopped, match=r"stopped by SIGTERM while waiting to see whether the holder of .*\.lock is still running"
    )
    Timer(0.1, lambda: request_stop("SIGTERM")).start()
    started = time.monotonic()
    try:
        with stopped, FolderLock(pytest.fail) as folder_lock:
            folder_lock.take(tmp_path)
    finally:
        forget_stop()
    assert time.monotonic() - started < 5


def test_lock_that_was_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder is known as soon as its content is there."""
    monkeypatch.setattr(lock, "STALE_AFTER_S", 6)
    (tmp_path / ".lock").touch()
    Timer(0.05, lambda: write_lock(tmp_path, describe_process())).start()
    started = time.monotonic()
    assert f"is in use by process {os.getpid()} on" in refused(tmp_path)
    assert time.monotonic() - started < 3


def test_fresh_remote_lock_is_respected(tmp_path: Path) -> None:
    file = write_lock(tmp_path, replace(describe_process(), host="node-7", machine="another", pid=99))
    with FolderLock(pytest.fail) as folder_lock:
        folder_lock.content = file.read_text()
        threading.Thread(target=folder_lock._run_heartbeat, args=(file,), daemon=True).start()
        assert "is in use by process 99 on node-7" in refused(tmp_path)


def test_ending_remote_job_frees_the_folder(tmp_path: Path) -> None:
    file = write_lock(tmp_path, replace(describe_process(), machine="another"))
    threading.Timer(0.2, file.unlink).start()
    with FolderLock(pytest.fail) as folder_lock:
        folder_lock.take(tmp_path)


@pytest.mark.parametrize("left", ["nothing", "of a killed job"])
def test_only_one_concurrent_job_gets_folder(tmp_path: Path, left: str) -> None:
    if left != "nothing":
        write_lock(tmp_path, replace(describe_process(), started="1"))
    locks = [FolderLock(pytest.fail) for _ in range(8)]

    def take(mine: FolderLock) -> bool:
        try:
            mine.take(tmp_path)
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, locks)) == 1
    for custom in locks:
        custom.__exit__()


def test_displaced_job_is_warned_and_leaves_lock(tmp_path: Path) -> None:
    lost: list[str] = []
    with FolderLock(lambda error: lost.append(str(error))) as folder_lock:
        folder_lock.take(tmp_path)
        file = write_lock(tmp_path, replace(describe_process(), host="node-7", pid=99))
        while not lost:
            time.sleep(0.01)
    assert "is in use by process 99 on node-7" in lost[0]
    assert file.exists()
