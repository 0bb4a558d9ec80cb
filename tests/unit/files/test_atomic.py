"""Files and folders that are either complete or missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsreason.errors import Stopped
from dsreason.files import atomic
from dsreason.files.atomic import build_once, hold_lock, open_draft, write_file
from dsreason.stopping import forget_stop, request_stop


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("content", "expected"), [("Größe\n", "Größe\n".encode()), (b"\xff", b"\xff")])
def test_file_is_replaced_atomically(tmp_path: Path, content: str | bytes, expected: bytes, durable: bool) -> None:
    (tmp_path / "a.json").write_text("old")
    write_file(tmp_path / "a.json", content, durable=durable)
    assert (tmp_path / "a.json").read_bytes() == expected
    assert names(tmp_path) == ["a.json"]


def test_failed_block_leaves_only_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(ZeroDivisionError), open_draft(tmp_path / "a.json") as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a.json").read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_concurrent_drafts_are_separate_and_last_wins(tmp_path: Path) -> None:
    with open_draft(tmp_path / "a") as first, open_draft(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a").read_text() == "first"


def test_one_thread_builds_and_all_get_folder(tmp_path: Path) -> None:
    built = []

    def build(partial: Path) -> None:
        built.append(partial)
        partial.mkdir()
        (partial / "a").write_text("a")

    with ThreadPoolExecutor(8) as threads:
        result = list(threads.map(lambda _: build_once(tmp_path / "cache" / "folder", build), range(8)))
    assert set(result) == {tmp_path / "cache" / "folder"}
    assert len(built) == 1
    assert names(tmp_path / "cache") == ["folder"]


def test_folder_built_in_the_meantime_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic.fcntl, "flock", lambda lock, how: (tmp_path / "folder").mkdir())
    assert build_once(tmp_path / "folder", lambda partial: pytest.fail("built")) == tmp_path / "folder"


def test_failed_build_leaves_no_folder_and_resumes(tmp_path: Path) -> None:
    def build(partial: Path) -> None:
        if partial.exists():
            return
        partial.mkdir()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "folder", build)
    assert not (tmp_path / "folder").exists()
    assert build_once(tmp_path / "folder", build).is_dir()


def test_stopped_process_does_not_wait_for_builder(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "folder"):
        request_stop("SIGTERM")
        try:
            with pytest.raises(Stopped, match="stopped by SIGTERM"):
                build_once(tmp_path / "folder", lambda partial: pytest.fail("built"))
        finally:
            forget_stop()
