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

PDSH = ("pdsh", "pdsh.bin")  # Debian wraps it in a script
TICK = 1.0
"""Seconds between two checks."""
JOB = ("--world_info=", "--master_addr=", "--master_port=")
"""Arguments that identify a job of `deepspeed`; every process between its runner and a rank has them on its command line."""


def end_with_launchers() -> None:
    """Kill this process when one of its launchers, which may not be its parent, is gone.

    The kernel reports only the end of the parent. `deepspeed` has a process between itself and the ranks, and on several
    hosts pdsh and ssh, which continue without it.
    """
    threading.Thread(target=_watch, args=[find_launchers()], name="launchers", daemon=True).start()


def find_launchers() -> list[psutil.Process]:
    """Return the processes that started this rank: its parent, and under `deepspeed` those above it.

    They reach up to the runner, or to sshd if the runner is on another host; on the runner's host they include pdsh, which
    reaches the other hosts.
    """
    launchers = []
    with suppress(psutil.Error):
        above: list[psutil.Process] = psutil.Process().parents()
        job = [word for parent in above[:1] for word in parent.cmdline() if word.startswith(JOB)]
        if len(job) != len(JOB):
            return above[:1]
        for process in above:
            launchers.append(process)
            if not _is_part_of_job(process, job):
                break
        for pdsh in [process for process in psutil.process_iter(["name"]) if process.info["name"] in PDSH]:
            if _is_part_of_job(pdsh, job):
                launchers += [pdsh, *pdsh.parents()[:1]]
    return launchers


def _is_part_of_job(process: psutil.Process, job: Sequence[str]) -> bool:
    with suppress(psutil.Error):  # the process may have ended meanwhile
        words = process.cmdline()  # a shell or ssh has all arguments in one word
        return all(any(text in word for word in words) for text in job)
    return False


def _watch(processes: Sequence[psutil.Process]) -> None:
    while all(_is_alive(process) for process in processes):
        time.sleep(TICK)
    logging.getLogger(CRASH_LOG).critical("a launcher of this rank is gone; ending")
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs: its id may belong to another one now, or it may be a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
