"""Device selection of a process, and its message on failure. Mocked torch functions simulate the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dsreason
from dsreason.errors import DsReasonError
from dsreason.job import hosts
from dsreason.job import ranks as module
from dsreason.job.gpu import choose_device
from dsreason.job.ranks import init_world

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {kind}, NCCL version 2.28.9\n{rest}"
DUPLICATE = NCCL.format(
    kind="invalid usage (run with NCCL_DEBUG=WARN for details)",
    rest="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000",
)
NCCL_MEMORY = NCCL.format(
    kind="unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    rest="ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
)
NCCL_OTHER = NCCL_MEMORY.replace("2 'out of memory'", "700 'an illegal memory access was encountered'")
NETWORK = NCCL.format(
    kind="remote process exited or there was a network error",
    rest="ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketPollConnect: connect to 10.0.0.2<41283> returned No route to host",
)
MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 2 has a total capacity of 79.10 GiB of which 1.56 MiB is free. "
    "Process 41 has 79.08 GiB memory in use."
)
ORDINAL = (
    "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\nCUDA kernel errors"
)
OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


@pytest.fixture(autouse=True)
def third_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    threads, cudnn = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.set_num_threads(threads)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """GPUs that the process has made current; the process has already joined its job."""
    result: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", result.append)
    for name, answer in {"is_initialized": True, "get_rank": 2, "get_world_size": 4}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    return result


def test_rank_uses_its_gpu_without_cudnn_attention(taken: list[torch.device]) -> None:
    assert init_world().device == torch.device("cuda:2")
    assert taken == [torch.device("cuda:2")]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_gpu_ranks_share_cores_under_torchrun(taken: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    init_world()
    assert torch.get_num_threads() == 6  # 24 cores, 4 ranks


def test_cpu_is_used_on_request_or_fallback(taken: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device(2) == torch.device("cpu")
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(2) == torch.device("cpu")
    assert not taken


def test_only_one_module_chooses_the_device() -> None:
    """Only one module may choose the device.

    Code that bypasses it would use cuDNN's attention, and would not report an unusable GPU.
    """
    files = Path(dsreason.__file__).parent.rglob("*.py")
    asking = {file.name for file in files if "cuda.is_available" in file.read_text(encoding="utf-8")}
    assert asking == {"gpu.py"}


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_more_ranks_than_gpus_reports_both_numbers(taken: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", failing(torch.AcceleratorError(ORDINAL)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        DsReasonError,
        match=r"rank 2 on .*: this host has no GPU 2: the number of visible GPUs is 2, .*0,1.*at most 2 ranks on this",
    ):
        init_world()


@pytest.fixture
def connect_fails(taken: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """A function that makes the first connection fail, after the rank has met the others in the store."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(hosts, "join", lambda: SimpleNamespace(set_timeout=lambda _: None))
    monkeypatch.setattr(hosts, "exchange", lambda *_: [])
    return lambda error: monkeypatch.setattr(module, "_init_deepspeed", failing(error))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (dist.DistBackendError(DUPLICATE), r"two ranks use the same GPU.*0,1.*rank 1 and rank 0 both on CUDA device"),
        (dist.DistBackendError(NCCL_MEMORY), r"GPU 2 is full before the model is loaded.*nvidia-smi"),
        (torch.OutOfMemoryError(MEMORY), r"GPU 2 is full before the model is loaded.*Process 41 has 79.08 GiB"),
        (dist.DistBackendError(NCCL_OTHER), r"a CUDA call failed inside NCCL.*illegal memory access"),
        (torch.AcceleratorError("CUDA error: no CUDA-capable device is detected"), "no GPU is visible"),
        (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "compute mode"),
        (
            torch.AcceleratorError("CUDA error: CUDA driver version is insufficient for CUDA runtime version"),
            "driver is too old",
        ),
        (
            torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
            "does not support GPU 2",
        ),
    ],
)
@pytest.mark.parametrize("ranks", ["1", "4"])
def test_failed_connection_is_reported_by_cause(
    connect_fails: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch, error: Exception, told: str, ranks: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    connect_fails(error)
    with pytest.raises(DsReasonError, match=f"(?s){told}") as raised:
        init_world()
    assert "firewall" not in str(raised.value)


def test_nccl_network_failure_is_reported_as_such(connect_fails: Callable[[Exception], None]) -> None:
    connect_fails(dist.DistBackendError(NETWORK))
    message = r"(?s)could not connect to each other.*No route to host.*NCCL_SOCKET_IFNAME.*firewall"
    with pytest.raises(DsReasonError, match=message):
        init_world()


def test_unknown_gpu_error_is_left_unchanged(connect_fails: Callable[[Exception], None]) -> None:
    connect_fails(torch.AcceleratorError("CUDA error: misaligned address"))
    with pytest.raises(torch.AcceleratorError, match="misaligned"):
        init_world()
