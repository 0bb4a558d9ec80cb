"""Files and folders that get their name only when they are complete: a process that is killed leaves nothing half-written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft_of(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """A path to write to, which takes the place of `file` at the end of the block. Nothing stays of a block that fails.

    Args:
        durable: wait until the disk has the content, and then its name: a power cut leaves the old file or the new one.
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
    """Write a whole file, or leave what was there. Text becomes UTF-8."""
    with draft_of(file, durable=durable) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """`folder`, which `build` fills under another name unless it is there. Of several processes one builds, others wait.

    What a failed `build` left is still there when it is called again. A cache has 256 locks for all its folders: one for
    each would leave as many files behind.
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
