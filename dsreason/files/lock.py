"""One job at a time in an output folder: a lock file that says who has it, and that its job touches every few seconds.

A lock of this machine is stale when its process is gone. Of another machine, or another container of this one, only the
file is seen: it is stale when nobody has touched it for a while. Locks of file systems are not relied on: some have none, and
NFS may keep one of a host that is gone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from dsreason.errors import ConfigError, Stopped
from dsreason.files.disk import read_small

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
HEARTBEAT_S = 10.0
STALE_AFTER_S = 180.0
"""After which a lock of another machine is stale. Native code may keep the thread that touches it from running for a while."""


@dataclass(frozen=True)
class Holder:
    """The process that has a lock: `Holder("node-1", "<boot id> pid:[4026531836]", 4711, "81034", "2026-01-31 12:00:00")`."""

    host: str
    machine: str
    """Where its process id means something: one boot of one machine, and there one container."""
    pid: int
    started: str
    """In ticks since the boot: process ids are used again."""
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class FolderLock(AbstractContextManager["FolderLock"]):
    """A folder that no other job may use from `take` to the end of the block.

    Args:
        on_lost: called, in a thread, with what to say where another job has taken the folder nevertheless: this one was
            not heard of for STALE_AFTER_S.
        asked_to_stop: the signal that asks this job to stop, or "". It is not kept waiting for another job.
    """

    def __init__(self, on_lost: Callable[[ConfigError], object], asked_to_stop: Callable[[], str] = lambda: "") -> None:
        self.on_lost = on_lost
        self.asked_to_stop = asked_to_stop
        self.file: Path | None = None
        self.content = ""
        self.over = threading.Event()

    def take(self, folder: Path) -> None:
        """Put our lock there.

        Raises:
            ConfigError: another job is in the folder; it names host and process.
            Stopped: before that was known.
        """
        file, content = folder / LOCK_FILE, json.dumps(asdict(this_process()))
        while not create(file, content):
            other = read(file)
            if is_alive(file, other, self.asked_to_stop):
                raise in_use(folder, other)
            remove_stale(file, other)
        self.file, self.content = file, content
        threading.Thread(target=self._heartbeat, args=(file,), name="lock", daemon=True).start()

    def _heartbeat(self, file: Path) -> None:
        while not self.over.wait(HEARTBEAT_S):
            with suppress(OSError, ConfigError):
                if (current := read(file)) not in ("", self.content):
                    self.on_lost(in_use(file.parent, current))
                    return
                os.utime(file)

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        with suppress(OSError, ConfigError):
            if self.file is not None and read(self.file) == self.content:
                self.file.unlink()


def check_not_in_use(folder: Path) -> None:
    """Raise ConfigError if a job on this machine uses the folder. Locks of others take a while to judge: `take` does it."""
    content = read(folder / LOCK_FILE)
    holder = parse(content)
    if holder is not None and holder.machine == this_machine() and start_time(holder.pid) == holder.started:
        raise in_use(folder, content)


def in_use(folder: Path, content: str) -> ConfigError:
    return ConfigError(
        f"{folder}: is in use by {parse(content) or 'another job'}; wait for it or end it, or choose another folder"
    )


def is_alive(file: Path, content: str, asked_to_stop: Callable[[], str]) -> bool:
    """Whether the job that has a lock is there. Of one on another machine this takes STALE_AFTER_S, in which it may end, too."""
    holder = parse(content)
    if holder is not None and holder.machine == this_machine():
        return start_time(holder.pid) == holder.started
    log.warning("%s: waiting up to %g s to see whether %s is alive", file, STALE_AFTER_S, holder or "another job")
    touched, alive, deadline = last_touched(file), False, time.monotonic() + STALE_AFTER_S
    while time.monotonic() < deadline:
        time.sleep(STALE_AFTER_S / 60)
        if name := asked_to_stop():
            raise Stopped(f"stopped by {name} while it waited to see whether {file} is of a job that is alive")
        now = last_touched(file)
        if now is None:
            return False
        alive = alive or now != touched
    return alive


def create(file: Path, content: str) -> bool:
    """Return False if the file is there already."""
    try:
        with file.open("x") as lock:
            lock.write(content)
    except FileExistsError:
        return False
    except OSError as error:
        with suppress(OSError):
            file.unlink()  # empty, on a full disk
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}); make room, or choose another folder"
        ) from None
    return True


def remove_stale(file: Path, content: str) -> None:
    """Remove a stale lock, unless another job has put its own in its place meanwhile. One job at a time gets here."""
    with suppress(FileNotFoundError), file.open("r+") as stale:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(stale, fcntl.LOCK_EX)
        if read(file) == content and file.stat().st_ino == os.fstat(stale.fileno()).st_ino:
            file.unlink()


def read(file: Path) -> str:
    """Return what a lock says; "" if there is none, or it is just being written.

    Raises:
        ConfigError: what is at its place is no lock: a folder, a FIFO, not text.
    """
    try:
        return read_small(file).decode()
    except (FileNotFoundError, NotADirectoryError) as error:
        if not file.is_symlink():
            return ""
        raise ConfigError(
            f"{file}: is no lock of ours (a link to nothing: {reason(error)}); remove it, or choose another folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: is no lock of ours ({reason(error)}); remove it, or choose another folder"
        ) from None


def reason(error: OSError | UnicodeDecodeError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "not UTF-8"


def parse(content: str) -> Holder | None:
    try:
        return TypeAdapter(Holder).validate_json(content, strict=True)
    except ValueError:
        return None


def last_touched(file: Path) -> int | None:
    """Return None if it is gone. It is opened because NFS answers from its cache for a file that is not."""
    try:
        with file.open() as lock:
            return os.fstat(lock.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def this_process() -> Holder:
    started = start_time(os.getpid()) or ""
    return Holder(socket.gethostname(), this_machine(), os.getpid(), started, time.strftime("%Y-%m-%d %H:%M:%S"))


def this_machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def start_time(pid: int) -> str | None:
    """Return when a process began, in ticks since the boot; None if there is none, or only its exit code is left."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
