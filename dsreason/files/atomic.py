"""Atomic writes: files and folders get their final name only when complete, so a killed process leaves nothing half-written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_draft(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path that replaces `file` at the end of the block, or is deleted if the block fails.

    Args:
        durable: sync the content to disk before renaming, so that a power failure leaves either the old or the new file.
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
    """Write a file completely, or leave the old one unchanged. Text is encoded as UTF-8."""
    with open_draft(file, durable=durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Sync the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, create it with `build`, which fills a temporary folder that is then renamed.

    One process builds the folder while others wait. A `build` that fails leaves its temporary folder behind for the next one to
    continue.
    """
    if not folder.is_dir():
        with hold_lock(folder):
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                build(partial)
                partial.rename(folder)
    return folder


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from building this folder. All folders in a cache share 256 lock files."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / folder.name[-2:]).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
