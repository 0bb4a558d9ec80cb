"""The processes that started a rank: when one of them is gone, the rank ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from dsreason.job.failures import CRASH_LOG

PDSH = ("pdsh", "pdsh.bin")  # Debian has a script in front of it
TICK = 1.0
"""Seconds between two looks."""
JOB = ("--world_info=", "--master_addr=", "--master_port=")
"""What tells one job of `deepspeed` from another: in the command line of all that stand between its runner and a rank."""


def end_with_launchers() -> None:
    """Kill this process when a launcher is gone, which need not be its parent.

    The kernel tells of the parent's end only. `deepspeed` has a process between itself and the ranks, and on several
    hosts pdsh and ssh: they go on without it.
    """
    threading.Thread(target=_watch, args=[launchers()], name="launchers", daemon=True).start()


def launchers() -> list[psutil.Process]:
    """The parent; under `deepspeed` also what is above it up to the runner, or to the sshd where that is on another host,
    and on the runner's host the pdsh that reaches the other hosts."""
    launchers = []
    with suppress(psutil.Error):
        above: list[psutil.Process] = psutil.Process().parents()
        job = [word for parent in above[:1] for word in parent.cmdline() if word.startswith(JOB)]
        if len(job) != len(JOB):
            return above[:1]
        for process in above:
            launchers.append(process)
            if not _is_of(process, job):
                break
        for pdsh in [process for process in psutil.process_iter(["name"]) if process.info["name"] in PDSH]:
            if _is_of(pdsh, job):
                launchers += [pdsh, *pdsh.parents()[:1]]
    return launchers


def _is_of(process: psutil.Process, job: Sequence[str]) -> bool:
    with suppress(psutil.Error):  # it may have ended meanwhile
        words = process.cmdline()  # a shell or ssh has all of it in one
        return all(any(text in word for word in words) for text in job)
    return False


def _watch(processes: Sequence[psutil.Process]) -> None:
    while all(_lives(process) for process in processes):
        time.sleep(TICK)
    logging.getLogger(CRASH_LOG).critical("a launcher of this rank is gone: ending")
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: psutil.Process) -> bool:
    """Return whether it runs: its number may belong to another process by now, or its parent has not asked how it ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
