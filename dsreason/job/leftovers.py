"""Temporary files whose names tell their owner, so that a later start can delete what killed processes left behind.

A name begins with `dsreason-<user>-<scope>-<pid>-<start time>-`. The scope is a hash of the boot and container in which the
process id is valid; files of other scopes are left alone, because their processes are not visible.
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
from contextlib import suppress
from functools import cache
from pathlib import Path

from dsreason.errors import ConfigError
from dsreason.files.disk import remove
from dsreason.files.lock import read_machine_id, read_start_time
from dsreason.job.failures import ERROR_DIR

SHARED_MEMORY = Path("/dev/shm")
MAX_PATH, SOCKET_NAME = 107, 40
"""Maximum length of a socket's path, and of the names of vLLM's and multiprocessing's sockets."""
OWNER = re.compile(r"dsreason-([0-9]+)-([0-9a-f]{8})-([0-9]+)-([0-9]+)-.*", re.DOTALL)


def build_prefix(pid: int | None = None) -> str:
    """Return the prefix of a process's temporary files; `pid` None stands for this process."""
    pid = os.getpid() if pid is None else pid
    return f"dsreason-{os.getuid()}-{get_scope()}-{pid}-{read_start_time(pid) or 0}-"


@cache
def get_scope() -> str:
    return hashlib.sha256(read_machine_id().encode()).hexdigest()[:8]


def make_temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder that belongs to this process; the caller closes it."""
    return tempfile.TemporaryDirectory(prefix=build_prefix())


@cache
def get_socket_folder() -> str | None:
    """Return the folder in which libraries create their sockets: the launcher's, or else one that this process deletes at exit.

    Return None if its path is too long for a socket; libraries then create their sockets directly in the temporary folder.
    """
    folder = os.environ.get(ERROR_DIR)
    if folder is None:
        folder = tempfile.mkdtemp(prefix=build_prefix())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder if len(folder) <= MAX_PATH - SOCKET_NAME else None


def keep_sockets_together() -> None:
    """Let multiprocessing create its sockets in `get_socket_folder`; its own folders have names without an owner."""
    if folder := get_socket_folder():
        multiprocessing.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def get_user_folder() -> Path:
    """Return the folder for files that this user's processes share; create it if it is missing.

    Raises:
        ConfigError: others can write to the folder.
    """
    folder = locate_user_folder()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)
    return folder


def locate_user_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"dsreason-{os.getuid()}"


def check_private(folder: Path) -> None:
    """Raise ConfigError unless the folder belongs to this user, and only to this user."""
    if (status := folder.lstat()).st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: must be a folder that you own and only you can access; remove it, or set TMPDIR to a folder that you own"
        )


def remove_leftovers() -> None:
    """Delete this user's temporary files and shared memory whose process no longer exists. Links are not followed."""
    for folder in (Path(tempfile.gettempdir()), SHARED_MEMORY, locate_user_folder()):
        with suppress(OSError, ConfigError):  # the folder does not exist, or belongs to somebody else
            if folder == locate_user_folder():
                check_private(folder)
            remove_leftovers_in(folder)


def remove_leftovers_in(folder: Path) -> None:
    for entry in os.scandir(folder):
        owner = OWNER.fullmatch(entry.name)
        if owner is None or owner[2] != get_scope() or read_start_time(int(owner[3])) == owner[4]:
            continue
        with suppress(OSError):  # another process may delete it at the same time
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                remove(Path(entry.path))
