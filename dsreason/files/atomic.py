"""Files and folders that get their name only when complete, so that a killed process leaves nothing half-written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_draft(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which replaces `file` at the end of the block. A block that fails leaves nothing.

    Args:
        durable: wait until the disk has the content, and then the name: a power cut leaves the old file or the new one.
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
    """Write a whole file, or leave the old one unchanged. Text is encoded as UTF-8."""
    with open_draft(file, durable=durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, `build` fills it under another name. One process builds while others wait.

    After a failure the next `build` finds what the failed one wrote. A cache has 256 locks for all its folders, because one
    per folder would leave too many files behind.
    """
    if not folder.is_dir():
        locks = folder.parent / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / folder.name[-2:]).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                partial = folder.with_name(f"{folder.name}.partial")
                build(partial)
                partial.rename(folder)
    return folder
