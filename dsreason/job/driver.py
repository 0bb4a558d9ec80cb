"""GPUs that torch cannot use because of the driver: it would go on without them."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

from dsreason.errors import ConfigError

WARNING = "CUDA initialization: "
"""How torch's warning begins."""
DRIVERS = {"12": 525, "13": 580}
"""Oldest NVIDIA driver for each major version of CUDA."""


@cache
def cuda_fault() -> str | None:
    """Why torch cannot use the GPUs of this machine; None where it can, where there are none, or where it is built without.

    torch warns of it once a process, so this comes before anything else that asks for GPUs.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable, count = torch.cuda.is_available(), torch.cuda.device_count()
    if usable or torch.version.cuda is None:
        return None
    warning = next((text for text in (str(one.message) for one in caught) if text.startswith(WARNING)), None)
    if warning is None:
        return f"the driver names {count}, and torch sees none" if count else None
    if count == 0 and not has_gpu():  # a driver without a GPU, as in images that are built with one
        return None
    return warning.removeprefix(WARNING).partition(" (Triggered")[0].partition(". Please update")[0]


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def check_gpus() -> None:
    """ConfigError where there are GPUs that torch cannot use, unless DS_ACCELERATOR asks for the CPU."""
    fault = cuda_fault()
    if fault is None or os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return
    import torch

    version = str(torch.version.cuda)
    driver = DRIVERS.get(version.partition(".")[0])
    needed = f", which needs an NVIDIA driver of version {driver} or newer" if driver else ""
    raise ConfigError(
        f"torch {torch.__version__} cannot use the GPUs of this machine: {fault}; it is built for CUDA {version}{needed}: "
        "look at nvidia-smi and update the driver, or set DS_ACCELERATOR=cpu to run on the CPU"
    )
