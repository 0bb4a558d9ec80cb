"""Helper that runs a function on real ranks: separate processes that communicate over gloo."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch.multiprocessing as mp

PRELOADED = ["tests.preloaded"]
"""Imported once, in a process from which all ranks are forked: the imports take longer than most tests."""
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # DeepSpeed looks for ninja
}


def run_on_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 900) -> list[Any]:
    """Call `fn(*args)` in `world_size` fresh processes, and return their results by rank.

    `fn` must be importable (module level) and joins the job itself with `init_world`. An `AssertionError` with the
    traceback of the first rank that failed is raised here; ranks still running after `timeout` seconds are stopped.
    """
    context = _rank_server()
    results: Any = context.Queue()
    port = _free_port()
    ranks = [
        context.Process(target=_run, args=(fn, rank, world_size, port, results, args)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    collected: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(collected) < world_size:
            with contextlib.suppress(queue.Empty):
                rank, error, value = results.get(timeout=1)
                if error is not None:
                    raise AssertionError(f"rank {rank} of {world_size} failed:\n{error}")
                collected[rank] = value
                continue
            missing = [rank for rank in range(world_size) if rank not in collected]
            died = {rank: ranks[rank].exitcode for rank in missing if ranks[rank].exitcode not in (None, 0)}
            if died:
                raise AssertionError(f"ranks died without a word (rank: exit code): {died}")
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {missing} of {world_size} gave no result within {timeout} s")
    finally:
        for process in ranks:
            process.join(timeout=10 if len(collected) == world_size else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [collected[rank] for rank in range(world_size)]


@cache
def _rank_server() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _free_port() -> int:
    """Below the ports that outgoing connections get: one of those is often taken before the ranks have it."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    mp.set_start_method("fork", force=True)  # data workers are forked, as in a real rank
    try:
        value = fn(*args)
    except BaseException:  # noqa: BLE001 (whatever it is, the test must see it)
        results.put((rank, traceback.format_exc(), None))
        raise SystemExit(1) from None
    results.put((rank, None, value))
    # torch tensors in a queue live in shared memory of the sender: results should be plain values or numpy arrays.
    with contextlib.suppress(ImportError):
        from dsreason.job.ranks import shutdown

        shutdown()
