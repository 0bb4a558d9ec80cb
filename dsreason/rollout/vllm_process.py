"""Code that contains vLLM's side effects on the trainer's process: environment, random state, shared memory, process groups."""

from __future__ import annotations

import gc
import glob
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import shared_memory
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING

from dsreason.job.leftovers import build_prefix, get_socket_folder, get_user_folder
from dsreason.job.ranks import World, broadcast_object

if TYPE_CHECKING:
    from vllm import LLM

DEFAULTS = {"VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment variables that are set by default on every device. vLLM logs only errors, because it would otherwise warn about
layers without weights at each reload, and at each sleep on a CPU; dsreason's own checks find real problems."""
CPU_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Additional defaults on a CPU: GiB of KV cache, and no binding to cores, which the trainer's threads would inherit."""


def set_environment(world: World) -> None:
    """Set the variables that vLLM reads on import; keep the user's values unless the engine cannot work with them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # external_launcher requires the engine core in this process
    os.environ.setdefault("VLLM_RPC_BASE_PATH", get_socket_folder() or str(get_user_folder()))  # otherwise /tmp
    for name, value in (DEFAULTS if world.device.type == "cuda" else DEFAULTS | CPU_DEFAULTS).items():
        os.environ.setdefault(name, value)


@contextmanager
def preserve_process_state(world: World) -> Iterator[None]:
    """Context manager that isolates trainer and engine from each other; every call into vLLM must run inside it.

    vLLM seeds every random generator, registers its own config classes with transformers and, on a CPU, replaces
    `torch.set_num_threads`; all these changes are undone. DeepSpeed's ZeRO-3 replaces torch's `linear` with its own autograd
    function, which vLLM's layers would run and compile; torch's original function is therefore restored for the duration of the
    call.
    """
    devices = [world.device] if world.device.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    linear = torch.nn.functional.linear
    config_classes = dict(CONFIG_MAPPING._extra_content)
    with torch.random.fork_rng(devices=devices):
        torch.nn.functional.linear = torch._C._nn.linear
        try:
            yield
        finally:
            torch.nn.functional.linear = linear
            CONFIG_MAPPING._extra_content = config_classes
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)


@contextmanager
def rename_shared_memory(world: World) -> Iterator[None]:
    """Context manager that adds an owner to the names of vLLM's shared-memory files, so that a later start recognises leftovers.

    On a CPU, ranks exchange tensors through files that vLLM gives the same names in every job and never deletes, so a second job
    on the machine would fail at start-up. Therefore, these files are also deleted once all ranks have opened them.
    """
    original = shared_memory._make_filename  # type: ignore[attr-defined]
    shared_memory._make_filename = lambda: f"/{build_prefix()}{token_hex(8)}"  # type: ignore[attr-defined]
    try:
        with nullcontext() if world.device.type == "cuda" else rename_tensor_files():
            yield
    finally:
        shared_memory._make_filename = original  # type: ignore[attr-defined]


@contextmanager
def rename_tensor_files() -> Iterator[None]:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    job, original = broadcast_object(f"{build_prefix()}{token_hex(16)}"), _CPUSHMDistributed.make_group_name
    names: list[str] = []

    def make_group_name(communicator: Any) -> str:
        names.append(f"{job}-" + original(communicator).strip("/"))
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
    """Shut down vLLM's worker and destroy its process groups, except the default group, which belongs to the trainer."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    map_pools()
    client = llm.llm_engine.engine_core
    # vLLM's finalizer is detached, because it would also destroy the default group when the engine is garbage-collected.
    if (finalizer := getattr(client, "_finalizer", None)) is not None:
        finalizer.detach()
    client.engine_core.model_executor.shutdown()
    destroy_model_parallel()
    gc.unfreeze()  # vLLM has frozen all objects that existed when it started, including its weights


def map_pools() -> None:
    """Map memory for the pools that are asleep, if enough GPU memory is free.

    vLLM unmaps a pool when it frees the pool; if the pool is already unmapped because of sleep, the allocator prints CUDA errors.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    if (allocator := CuMemAllocator.instance) is None:  # sleep mode is disabled, for example on a CPU
        return
    asleep = [data for data in allocator.pointer_to_data.values() if data.is_asleep]
    with suppress(RuntimeError):  # another process may take the memory first, or a GPU error caused the shutdown
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if asleep and sum(data.handle[1] for data in asleep) <= free:
            allocator.wake_up(tags=sorted({data.tag for data in asleep}))
