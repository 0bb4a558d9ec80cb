"""Side effects of vLLM on the trainer's process: environment, random state, shared memory, process groups."""

from __future__ import annotations

import gc
import glob
import os
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsreason.job.ranks import World, broadcast_object

if TYPE_CHECKING:
    from vllm import LLM

DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}
"""Defaults on every device. vLLM warns at every reload of layers without weights and at every sleep on a CPU; the checks
here cover what matters."""
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Defaults on a CPU: GiB for keys and values, and no binding to cores, which the trainer's threads would inherit."""


def set_environment(world: World) -> None:
    """Set the variables that vLLM reads when it is imported; the user's values stay unless the engine cannot work with them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # external_launcher needs the core in this process
    for name, value in (DEFAULTS if world.device.type == "cuda" else DEFAULTS | CPU_DEFAULTS).items():
        os.environ.setdefault(name, value)


@contextmanager
def preserve_process_state(world: World) -> Iterator[None]:
    """Isolate trainer and engine from each other; wraps everything that vLLM does.

    vLLM seeds every generator and, on a CPU, replaces `torch.set_num_threads`; both are restored. DeepSpeed's ZeRO-3 has
    replaced torch's `linear` by its own, with an autograd function that vLLM's layers would run and compile.
    """
    devices = [world.device] if world.device.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    linear = torch.nn.functional.linear
    with torch.random.fork_rng(devices=devices):
        torch.nn.functional.linear = torch._C._nn.linear
        try:
            yield
        finally:
            torch.nn.functional.linear = linear
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)


@contextmanager
def rename_shared_memory(world: World) -> Iterator[None]:
    """Give vLLM's shared memory files names that are unique to this job, and delete them once all ranks have them open.

    Ranks on a CPU exchange tensors through these files. vLLM uses the same names in every job and leaves the files behind,
    so a second job on the machine would fail at its start.
    """
    if world.device.type == "cuda":
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    job, original = broadcast_object(uuid.uuid4().hex), _CPUSHMDistributed.make_group_name
    names: list[str] = []

    def make_group_name(communicator: Any) -> str:
        names.append(f"dsreason-{job}-" + original(communicator).strip("/"))
        return names[-1]

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
        for name in names:
            for file in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
                file.unlink(missing_ok=True)


def release(llm: LLM) -> None:
    """End vLLM's worker and process groups; the default group is the trainer's and stays."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    map_pools()
    client = llm.llm_engine.engine_core
    # vLLM's own shutdown, which runs when the engine is collected, destroys the default group too.
    if (finalizer := getattr(client, "_finalizer", None)) is not None:
        finalizer.detach()
    client.engine_core.model_executor.shutdown()
    destroy_model_parallel()
    gc.unfreeze()  # vLLM froze whatever existed at its start, its weights included


def map_pools() -> None:
    """Map the memory of sleeping pools again, if enough is free.

    vLLM unmaps a pool when it frees it; if sleep has already unmapped the pool, its allocator prints CUDA errors.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if (allocator := CuMemAllocator.instance) is None:  # no sleep mode, for example on a CPU
        return
    asleep = [data for data in allocator.pointer_to_data.values() if data.is_asleep]
    with suppress(RuntimeError):  # another process may take the memory first, or the engine ends because of a GPU error
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if asleep and sum(data.handle[1] for data in asleep) <= free:
            allocator.wake_up(tags=sorted({data.tag for data in asleep}))
