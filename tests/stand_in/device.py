"""Turns this process into one with a GPU that is none: call `install` before anything asks torch for its devices.

Tensors say `cuda:0`, lie in host memory and are computed by the CPU's kernels; an operation between them and tensors of the
CPU is refused, or noted, with the line of Python that asked for it. What `torch.cuda` tells of streams, events and memory
is made up. NCCL's place takes gloo, for tensors of the stand-in only.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "dsreason_stand_in"
SOURCE = Path(__file__).with_name("device.cpp")
TOTAL_MEMORY = 80 * 2**30

mixed: list[str] = []
"""Operations that mixed devices: line of Python, operation, shapes of the tensors on the CPU."""
_tolerant = False


class MixedDevicesError(RuntimeError):
    """The counterpart of a GPU's error "Expected all tensors to be on the same device"."""


def install(folder: Path) -> None:
    """Give this process a device `cuda:0`, irreversibly.

    The device is compiled in `folder`, once, which takes some ten seconds.
    """
    from torch.utils.cpp_extension import load

    load(NAME, [str(SOURCE)], extra_cflags=["-O0"], build_directory=str(folder)).when_mixed(_when_mixed)
    for name, value in _told_of_the_device().items():
        setattr(torch.cuda, name, value)
    torch.cuda._lazy_init = lambda: None
    torch.UntypedStorage.resize_ = _resize
    torch.Tensor.record_stream = lambda tensor, stream: None
    dist.Backend.register_backend("stand_in", _create_group, devices=["cuda"])
    dist.init_process_group = _init_process_group


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Inside, mixed operations are computed and noted in the list, and not refused."""
    global _tolerant
    mixed.clear()
    _tolerant = True
    try:
        yield mixed
    finally:
        _tolerant = False


def _when_mixed(operation: str, shapes: str) -> None:
    text = f"{_caller()}: {operation} mixes cuda:0 with tensors of the CPU of shape {shapes}"
    mixed.append(text)
    if not _tolerant:
        raise MixedDevicesError(text)


def _caller() -> str:
    """File and line of the innermost call outside of torch."""
    torch_folder = str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_stack()[:-2] if not frame.filename.startswith(torch_folder)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "a thread of autograd"


# ---------------------------------------------------------------- torch.cuda


class _Stream:
    """Everything is done at once, so there is nothing to wait for."""

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _told_of_the_device() -> dict[str, Any]:
    """Return the functions that replace those of `torch.cuda`, by name.

    Each has a separate function, because torch's compiler distinguishes them.
    """
    properties = SimpleNamespace(
        name="stand-in", total_memory=TOTAL_MEMORY, major=9, minor=0, multi_processor_count=1, is_integrated=False
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "is_current_stream_capturing": False,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "mem_get_info": (TOTAL_MEMORY, TOTAL_MEMORY),
        "memory_stats": {},
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all")),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats")),
    }
    return {
        **{name: _answer(value) for name, value in answers.items()},
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "nvtx": SimpleNamespace(range_push=_answer(None), range_pop=_answer(None)),
    }


def _answer(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        torch._C.StorageBase.resize_(storage, size)
        return storage
    full = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.ops.stand_in.resize_storage(full, size)
    return storage


# ---------------------------------------------------------------- collectives

_real_init_process_group = dist.init_process_group


def _init_process_group(backend: str, **settings: Any) -> None:
    _real_init_process_group({"nccl": "stand_in"}.get(backend, backend), **settings)


def _create_group(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return _Group(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def _view(tensors: Any) -> Any:
    """The memory of tensors of the stand-in; NCCL takes no others."""
    if isinstance(tensors, torch.Tensor):
        if tensors.device.type != "cuda":
            raise MixedDevicesError(f"{_caller()}: NCCL was given a tensor of the CPU of shape {list(tensors.shape)}")
        return torch.ops.stand_in.host_view(tensors.detach())
    return [_view(tensor) for tensor in tensors] if isinstance(tensors, list | tuple) else tensors


def _over_gloo(name: str) -> Any:
    def call(group: _Group, *args: Any, **options: Any) -> Any:
        work = getattr(group.gloo, name)(*[_view(argument) for argument in args], **options)
        work.wait()
        return work

    return call


class _Group(dist.ProcessGroup):
    """gloo on the memory of the stand-in."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.gloo = gloo

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "stand_in"

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Any:
        return None

    allreduce = _over_gloo("allreduce")
    allreduce_coalesced = _over_gloo("allreduce_coalesced")
    broadcast = _over_gloo("broadcast")
    allgather = _over_gloo("allgather")
    _allgather_base = _over_gloo("_allgather_base")
    reduce_scatter = _over_gloo("reduce_scatter")
    _reduce_scatter_base = _over_gloo("_reduce_scatter_base")
    all_gather_single = _allgather_base  # so called from torch 2.13 on
    reduce_scatter_single = _reduce_scatter_base
    reduce = _over_gloo("reduce")
    barrier = _over_gloo("barrier")
