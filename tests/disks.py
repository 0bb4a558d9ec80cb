"""Full and read-only disks: small file systems in memory. File modes would not do: they do not bind root."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "1m") -> Iterator[Path]:
    """A file system of that size at `folder`; the test is skipped where none can be mounted."""
    folder.mkdir()
    mounted = mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    if mounted:
        pytest.skip(f"no small file system can be mounted ({mounted}); that takes root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def set_read_only(folder: Path, *, to: bool = True) -> None:
    if failed := mount("-o", f"remount,{'ro' if to else 'rw'}", folder):
        raise OSError(failed)


def mount(*arguments: object) -> str:
    """Empty, or why it failed."""
    if shutil.which("mount") is None:
        return "there is no mount command"
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
