"""Atomic writes: files and folders get their final name only once they are complete, so none is ever left half-written."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsreason.stopping import pause

LOCK_POLL_S = 0.02


@contextmanager
def open_draft(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` at the end of the block, or is deleted if the block fails.

    Args:
        durable: sync the content to disk before renaming, so that after a power failure, either the old or the new file exists.
    """
    draft = file.with_name(f".{file.name}.{os.urandom(4).hex()}.partial")
    try:
        yield draft
        if durable:
            flush(draft)
        draft.replace(file)
        if durable:
            flush(file.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_file(file: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file completely, or leave the old file unchanged. Text is encoded as UTF-8."""
    with open_draft(file, durable=durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return `folder`. If it does not exist, create it: `build` fills a temporary folder, which is then renamed.

    One process builds the folder while the others wait.
    """
    if not folder.is_dir():
        with hold_lock(folder):
            if not folder.is_dir():
                build_or_replace(folder, build)
    return folder


def build_or_replace(folder: Path, build: Callable[[Path], object]) -> None:
    """Fill a temporary folder with `build` and rename it to `folder`. Only then is an old folder deleted.

    If `build` fails, the temporary folder stays, so that the next call can continue. The caller must hold the lock.
    """
    partial, old = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("partial", "old"))
    build(partial)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from building this folder during the block. All folders in a cache share 256 lock files.

    Raises:
        Stopped: this process was asked to stop while it waited.
    """
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / folder.name[-2:]).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pause(LOCK_POLL_S)
        yield
