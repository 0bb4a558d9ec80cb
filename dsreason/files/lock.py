"""A lock file that lets only one job use an output folder. It names its holder, the process that touches it every few seconds.

A lock taken on this machine is stale if its holder no longer exists. Processes on another machine, or in another container on
this machine, are not visible; their lock is stale if it has not been touched for a while. File-system locks would not be
reliable: some file systems do not support them, and NFS may keep the lock of a host that has crashed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from dsreason.errors import ConfigError, Stopped
from dsreason.files.disk import read_small
from dsreason.stopping import pause

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
HEARTBEAT_S = 10.0
STALE_AFTER_S = 180.0
"""Seconds without a touch after which a lock held by another machine counts as stale. The limit is generous, because native
code may block the thread that touches the lock."""

WRITE_S = 0.2
"""Seconds to wait for the content of an empty lock file."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock: `Holder("node-1", "<boot id> pid:[4026531836]", 4711, "81034", "2026-01-31 12:00:00")`."""

    host: str
    machine: str
    """Scope in which the process id is valid: a boot of the machine, and a container on it."""
    pid: int
    started: str
    """The process's start time in clock ticks since boot, which distinguishes it from a later process with the same id."""
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class LockWriteError(ConfigError):
    """Error for a lock file that cannot be created. `no_folder` is True if its folder does not exist (any more)."""

    def __init__(self, text: str, *, no_folder: bool = False) -> None:
        super().__init__(text)
        self.no_folder = no_folder


class FolderLock(AbstractContextManager["FolderLock"]):
    """A lock that keeps other jobs from using a folder, from the call to `take` until the end of the block.

    Args:
        on_lost: callback that gets an error if another job takes over the folder because this job has not touched its lock
            for STALE_AFTER_S seconds; called in a separate thread.
    """

    def __init__(self, on_lost: Callable[[ConfigError], object]) -> None:
        self.on_lost = on_lost
        self.file: Path | None = None
        self.content = ""
        self.over = threading.Event()

    def take(self, folder: Path) -> None:
        """Create the lock, after removing a stale lock.

        Raises:
            ConfigError: another job uses the folder; the message names its host and process.
            LockWriteError: the lock file cannot be created.
            Stopped: this process was asked to stop while it waited to see whether another job still uses the folder.
        """
        file, content = folder / LOCK_FILE, json.dumps(asdict(describe_process()))
        while not create(file, content):
            current = read(file)
            if is_alive(file, current):
                raise make_in_use_error(folder, current)
            remove_stale(file, current)
        self.file, self.content = file, content
        threading.Thread(target=self._run_heartbeat, args=(file,), name="lock", daemon=True).start()

    def _run_heartbeat(self, file: Path) -> None:
        while not self.over.wait(HEARTBEAT_S):
            with suppress(OSError, ConfigError):
                if (current := read(file)) not in ("", self.content):
                    self.on_lost(make_in_use_error(file.parent, current))
                    return
                os.utime(file)

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        with suppress(OSError, ConfigError):
            if self.file is not None and read(self.file) == self.content:
                self.file.unlink()


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock the folder during the block, so that no other process can do the same; create the folder if it is missing.

    Raises:
        ConfigError: another process uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(lambda error: log.error("%s", error)) as lock:
        lock.take(folder)
        yield


def check_not_in_use(folder: Path) -> None:
    """Raise ConfigError if a job on this machine uses the folder. Locks held by other machines are checked only by `take`."""
    content = read(folder / LOCK_FILE)
    holder = parse(content)
    if holder is not None and holder.machine == read_machine_id() and read_start_time(holder.pid) == holder.started:
        raise make_in_use_error(folder, content)


def make_in_use_error(folder: Path, content: str) -> ConfigError:
    return ConfigError(
        f"{folder}: is in use by {parse(content) or 'another job'}; wait until it ends, stop it, or choose another folder"
    )


def is_alive(file: Path, content: str) -> bool:
    """Return whether a lock's holder is alive. If the holder is on another machine, this takes up to STALE_AFTER_S seconds.

    The result is False if the lock no longer exists or its content is no longer `content`.
    """
    holder = parse(content)
    if holder is not None and holder.machine == read_machine_id():
        return read_start_time(holder.pid) == holder.started
    if not content:
        pause(WRITE_S)  # the holder may be about to write the content
        if read(file):
            return False
    if (touched := get_last_touch(file)) is None:
        return False
    log.warning(
        "%s: waiting up to %g s to see whether %s is still running", file, STALE_AFTER_S, holder or "another job"
    )
    alive, deadline = False, time.monotonic() + STALE_AFTER_S
    while time.monotonic() < deadline:
        try:
            pause(STALE_AFTER_S / 60)
        except Stopped as stop:
            raise Stopped(f"{stop} while waiting to see whether the holder of {file} is still running") from None
        now = get_last_touch(file)
        if now is None or read(file) != content:
            return False
        alive = alive or now != touched
    return alive


def create(file: Path, content: str) -> bool:
    """Create the file with this content; return False if it already exists."""
    try:
        with file.open("x") as lock:
            lock.write(content)
    except FileExistsError:
        return False
    except OSError as error:
        with suppress(OSError):
            file.unlink()  # otherwise, a full disk would leave an empty file behind
        raise LockWriteError(
            f"{file}: cannot be written ({error.strerror}); free disk space, or choose another folder",
            no_folder=isinstance(error, FileNotFoundError),
        ) from None
    return True


def remove_stale(file: Path, content: str) -> None:
    """Remove a stale lock, unless another job has replaced it in the meantime. Only one job at a time can do this."""
    with suppress(FileNotFoundError), file.open("r+") as stale:
        with suppress(OSError):  # the file system may not support locks
            fcntl.flock(stale, fcntl.LOCK_EX)
        if read(file) == content and file.stat().st_ino == os.fstat(stale.fileno()).st_ino:
            file.unlink()


def read(file: Path) -> str:
    """Return a lock file's content; "" if the file is missing or still being written.

    Raises:
        ConfigError: the path is not a lock file but, for example, a folder, a FIFO or a binary file.
    """
    try:
        return read_small(file).decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not file.is_symlink():
            return ""
        raise ConfigError(
            f"{file}: is not a dsreason lock (a dangling link: {get_error_reason(error)}); remove it, or choose another folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: is not a dsreason lock ({get_error_reason(error)}); remove it, or choose another folder"
        ) from None


def get_error_reason(error: OSError | UnicodeDecodeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "is not UTF-8"


def parse(content: str) -> Holder | None:
    try:
        return TypeAdapter(Holder).validate_json(content, strict=True)
    except ValueError:
        return None


def get_last_touch(file: Path) -> int | None:
    """Return the file's modification time in nanoseconds; None if the file no longer exists.

    The function opens the file, because NFS reports cached attributes for files that are not open.
    """
    try:
        with file.open() as lock:
            return os.fstat(lock.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def describe_process() -> Holder:
    started = read_start_time(os.getpid()) or ""
    return Holder(socket.gethostname(), read_machine_id(), os.getpid(), started, time.strftime("%Y-%m-%d %H:%M:%S"))


def read_machine_id() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def read_start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; None if the process does not exist or is a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
