"""Temporary files whose names identify their owner, so that a later start can delete the files of killed processes.

A name begins with `dsreason-<user>-<scope>-<pid>-<start time>-`. The scope is a hash that identifies the boot and the container
in which the process id is valid. Files from other scopes are left alone, because their processes are not visible.
"""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from dsreason.errors import ConfigError
from dsreason.files.disk import remove
from dsreason.files.lock import read_machine_id, read_start_time
from dsreason.job.failures import ERROR_DIR

SHARED_MEMORY = Path("/dev/shm")
MAX_PATH, SOCKET_NAME = 107, 40
"""Maximum length of a socket's path, and maximum length of the names that vLLM and multiprocessing give to their sockets."""
UNKNOWN_START = "0"
"""Start time in the names of files whose owner is not visible, such as the parent of a process started by `docker exec`."""
KEEP_UNKNOWN_S = 24 * 3600
"""Age in seconds from which files with an invisible owner are deleted."""
OWNER = re.compile(r"dsreason-([0-9]+)-([0-9a-f]{8})-([0-9]+)-([0-9]+)-.*", re.DOTALL)


def build_prefix(pid: int | None = None) -> str:
    """Return the prefix for the names of a process's temporary files; None stands for this process."""
    pid = os.getpid() if pid is None else pid
    return f"dsreason-{os.getuid()}-{get_scope()}-{pid}-{read_start_time(pid) or UNKNOWN_START}-"


@cache
def get_scope() -> str:
    return hashlib.sha256(read_machine_id().encode()).hexdigest()[:8]


def make_temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder that belongs to this process; the caller must clean it up."""
    return tempfile.TemporaryDirectory(prefix=build_prefix())


@cache
def get_socket_folder() -> str | None:
    """Return the folder for sockets that libraries create: the launcher's, or a new one, deleted when this process ends.

    Return None if its path is too long for sockets; libraries then use the temporary folder itself.
    """
    folder = os.environ.get(ERROR_DIR)
    if folder is None:
        folder = tempfile.mkdtemp(prefix=build_prefix())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder if len(folder) <= MAX_PATH - SOCKET_NAME else None


def keep_sockets_together() -> None:
    """Make multiprocessing create its sockets in `get_socket_folder()`, because the names of its own folders show no owner."""
    if folder := get_socket_folder():
        multiprocessing.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def get_user_folder() -> Path:
    """Return the folder for files that this user's processes share; create it if it is missing.

    Raises:
        ConfigError: other users have access to the folder.
    """
    folder = locate_user_folder()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)
    return folder


def locate_user_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"dsreason-{os.getuid()}"


def check_private(folder: Path) -> None:
    """Raise ConfigError unless the folder belongs to this user and is closed to all others."""
    if (status := folder.lstat()).st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: must be a folder that you own and only you can access; remove it, or set TMPDIR to a folder that you own"
        )


def remove_leftovers() -> None:
    """Delete temporary files and shared memory of this user's processes that no longer exist. Links are not followed.

    Files with an invisible owner are kept for a day.
    """
    for folder in (Path(tempfile.gettempdir()), SHARED_MEMORY, locate_user_folder()):
        with suppress(OSError, ConfigError):  # the folder may be missing or belong to somebody else
            if folder == locate_user_folder():
                check_private(folder)
            remove_leftovers_in(folder)


def remove_leftovers_in(folder: Path) -> None:
    for entry in os.scandir(folder):
        owner = OWNER.fullmatch(entry.name)
        if owner is None or owner[2] != get_scope() or read_start_time(int(owner[3])) == owner[4]:
            continue
        with suppress(OSError):  # another process may delete it at the same time
            status = entry.stat(follow_symlinks=False)
            if owner[4] == UNKNOWN_START and time.time() - status.st_mtime < KEEP_UNKNOWN_S:
                continue
            if status.st_uid == os.getuid():
                remove(Path(entry.path))
