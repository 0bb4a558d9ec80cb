"""Monitoring of the processes that started a rank. If one of them is gone, the rank is killed."""

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

PDSH = ("pdsh", "pdsh.bin")  # Debian wraps pdsh.bin in a script
TICK = 1.0
"""Seconds between two checks of the launchers."""
JOB = ("--world_info=", "--master_addr=", "--master_port=")
"""Arguments that identify a `deepspeed` job. They are in the command line of every process between the runner and a rank."""


def end_with_launchers() -> None:
    """Start a thread that kills this process as soon as any of its launchers is gone, not only its parent.

    The kernel reports only the end of the parent. Between `deepspeed` and its ranks, there are another process and, on several
    hosts, pdsh and ssh; all of these keep running when `deepspeed` ends.
    """
    threading.Thread(target=_watch, args=[find_launchers()], name="launchers", daemon=True).start()


def find_launchers() -> list[psutil.Process]:
    """Return the processes that started this rank: its parent and, under `deepspeed`, further ancestors.

    The ancestors reach up to the runner, or to sshd if the runner is on another host. On the runner's host, the result also
    includes pdsh, which starts the ranks on the other hosts, and its parent.
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
    with suppress(psutil.Error):  # the process may have ended in the meantime
        words = process.cmdline()  # a shell or ssh may pass all arguments in a single word
        return all(any(text in word for word in words) for text in job)
    return False


def _watch(processes: Sequence[psutil.Process]) -> None:
    while all(_is_alive(process) for process in processes):
        time.sleep(TICK)
    logging.getLogger(CRASH_LOG).critical("a launcher of this rank has ended; ending this rank")
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process is still running: neither gone, nor a zombie, nor replaced by a process with the same id."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
