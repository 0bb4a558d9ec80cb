"""GPU setup: check whether torch can use the GPUs, choose this process's GPU, and explain GPU errors at startup.

Importing this module does not import torch, because commands read their configuration first.
"""

from __future__ import annotations

import os
import re
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dsreason.errors import ConfigError, DsReasonError

if TYPE_CHECKING:
    import torch

WARNING = "CUDA initialization: "
"""Prefix of torch's warning that it cannot use the GPUs."""
DRIVERS = {"12": 525, "13": 580}
"""Oldest supported NVIDIA driver version for each major version of CUDA."""
CAUSES = {
    r"Duplicate GPU detected": "two ranks use the same GPU; start one rank per GPU, and check whether "
    "CUDA_VISIBLE_DEVICES ({visible}) lists a GPU twice, or shows the same single GPU to every rank",
    r"invalid device ordinal": "this host has no GPU {local_rank}: the number of visible GPUs is {gpus}, and they are "
    "numbered from 0 (CUDA_VISIBLE_DEVICES: {visible}); each rank needs a separate GPU, so start at most {gpus} ranks on this "
    "host (--nproc, --nproc-per-node, --num_gpus)",
    r"CUDA out of memory|C(uda|UDA) (failure|error).*out of memory": "GPU {local_rank} is full before the model is loaded; "
    "stop the processes that use its memory (see `nvidia-smi`), or choose other GPUs with CUDA_VISIBLE_DEVICES ({visible})",
    r"driver (on your system is too old|version is insufficient)": "the NVIDIA driver is too old for this torch ({torch}, "
    "built for CUDA {cuda}); update the driver (CUDA 13 needs 580 or newer), or install a build of torch for the "
    "driver's CUDA version",
    r"unsupported display driver": "parts of different NVIDIA driver versions are installed; install one version, and "
    "restart this host (or its container)",
    r"no CUDA-capable device": "no GPU is visible; check `nvidia-smi`, CUDA_VISIBLE_DEVICES ({visible}), and that the "
    "container was started with GPUs",
    r"busy or unavailable": "another process uses GPU {local_rank}, whose compute mode allows only one process; stop that "
    "process, or set the mode to default (`nvidia-smi --compute-mode=0`)",
    r"no kernel image": "this torch ({torch}, built for CUDA {cuda}) does not support GPU {local_rank}; install one that does",
    r"CUDA unknown error": "the NVIDIA driver does not respond; restart this host (or its container)",
    r"ncclUnhandledCudaError": "a CUDA call failed inside NCCL; set NCCL_DEBUG=INFO to see which",
}
"""Explanations for CUDA and NCCL errors at startup: regular expression for the error message → explanation."""


@cache
def find_cuda_fault() -> str | None:
    """Return why torch cannot use this machine's GPUs; None if it can, if there are no GPUs, or if torch is a CPU build.

    torch issues its warning only once per process, so call this before any other code queries the GPUs.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable, count = torch.cuda.is_available(), torch.cuda.device_count()
    if usable or torch.version.cuda is None:
        return None
    warning = next(
        (text for text in (str(caught_warning.message) for caught_warning in caught) if text.startswith(WARNING)), None
    )
    if warning is None:
        return f"the driver reports {count}, but torch detects none" if count else None
    if count == 0 and not has_gpu():  # some container images include a driver, even on machines without a GPU
        return None
    return warning.removeprefix(WARNING).partition(" (Triggered")[0].partition(". Please update")[0]


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def check_gpus() -> None:
    """Raise ConfigError if the machine has GPUs that torch cannot use, unless DS_ACCELERATOR selects the CPU."""
    fault = find_cuda_fault()
    if fault is None or os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return
    import torch

    version = str(torch.version.cuda)
    driver = DRIVERS.get(version.partition(".")[0])
    needed = f", which needs an NVIDIA driver of version {driver} or newer" if driver else ""
    raise ConfigError(
        f"torch {torch.__version__} cannot use the GPUs of this machine: {fault} (torch is built for CUDA {version}{needed}); "
        "update the driver (`nvidia-smi` shows its version), or set DS_ACCELERATOR=cpu to run on the CPU"
    )


def choose_device(local_rank: int) -> torch.device:
    """Make this rank's GPU the current device and return it; return the CPU if there is no GPU or DS_ACCELERATOR selects the CPU.

    Raises:
        DsReasonError: there are GPUs, but this rank cannot use its GPU.
    """
    import torch

    check_gpus()
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    with translate_gpu_errors():
        torch.cuda.set_device(device)
    # On Hopper and newer GPUs, torch prefers cuDNN's attention, but its gradients can be NaN if there is a mask, and it
    # compiles new kernels for every sequence length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


@contextmanager
def translate_gpu_errors() -> Iterator[None]:
    """Convert CUDA and NCCL errors with a known cause to a DsReasonError that names the cause."""
    try:
        yield
    except RuntimeError as error:
        if text := describe_gpu_error(str(error)):
            raise DsReasonError(text) from error
        raise


def describe_gpu_error(error: str) -> str | None:
    """Return an explanation for a CUDA or NCCL error, with advice; None if no pattern in `CAUSES` matches the error."""
    import torch

    text = next((text for pattern, text in CAUSES.items() if re.search(pattern, error)), None)
    if text is None:
        return None
    facts = {
        "local_rank": os.environ.get("LOCAL_RANK", "0"),
        "gpus": torch.cuda.device_count(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    rank = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
    return f"{rank}: {text.format(**facts)} ({' '.join(error.split())[:300]})"
