"""Checks of the GPUs: whether the driver and torch see them, and whether other processes use their memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from dsreason.tools.doctor.finding import (
    DoctorFinding,
    find_last_line,
    report_failure,
    report_pass,
    report_warning,
    run_program,
)

QUERY = "index,name,driver_version,memory.total,memory.used,compute_cap,mig.mode.current,ecc.errors.uncorrected.volatile.total"
SECONDS = 20
FLASH = (8, 0)
"""Minimum compute capability for bf16 and flash attention."""
BUSY = 1024
"""MiB in use on a GPU above which a warning is issued."""


def check_gpus() -> Iterator[DoctorFinding]:
    from dsreason.imports import make_imports_fast
    from dsreason.job.gpu import find_cuda_fault

    with make_imports_fast():
        import torch
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        cure = "unset DS_ACCELERATOR to use GPUs"
        yield report_warning("GPUs", f"DS_ACCELERATOR is {os.environ['DS_ACCELERATOR']}, so GPUs are not used", cure)
    if fault := find_cuda_fault():
        cure = "update the driver (CUDA 13 needs 580 or newer), or install a torch build for the driver's CUDA version"
        yield report_failure("GPUs", f"torch {torch.__version__} cannot use the GPUs: {fault}", cure)
        return
    count = torch.cuda.device_count()
    cards = list_cards()
    if count == 0:
        yield from check_without_gpus(torch.version.cuda, len(cards))
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield report_pass(
        "GPUs", f"torch sees {count}" + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")
    )
    if visible is None and len(cards) not in (0, count):
        yield report_warning(
            "GPUs", f"the driver reports {len(cards)}, but torch sees {count}", "check nvidia-smi for a failed GPU"
        )
    for card in cards:
        yield from check_card(card)
    capability = min(torch.cuda.get_device_capability(number) for number in range(count))
    if capability < FLASH:
        capability_text = ".".join(map(str, capability))
        yield report_warning(
            "GPUs",
            f"compute capability {capability_text} does not support flash attention",
            'set train.precision = "fp32", or use newer GPUs',
        )


def check_without_gpus(built_for: str | None, cards: int) -> Iterator[DoctorFinding]:
    if cards and built_for is None:
        yield report_failure(
            "GPUs",
            f"the driver reports {cards}, but this torch is built without CUDA",
            "run `make setup` on this machine",
        )
    elif cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield report_failure(
            "GPUs",
            f"the driver reports {cards}, but torch sees none",
            f"CUDA_VISIBLE_DEVICES is {visible!r}; correct it",
        )
    else:
        yield report_warning("GPUs", "none were found, so runs use the CPU", "this is enough for tiny models and tests")


def list_cards() -> list[list[str]]:
    """Return each card's values for the fields in `QUERY`; return [] if the driver is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    code, text = run_program(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"], SECONDS)
    lines = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [line for line in lines if len(line) == len(QUERY.split(","))] if code == 0 else []


def check_card(card: list[str]) -> Iterator[DoctorFinding]:
    number, name, driver, total, used, _, mig, errors = card
    description = f"{name}, {parse_mib(total) / 1024:.0f} GiB, driver {driver}"
    if parse_mib(used) > BUSY:
        cure = "stop the processes that `nvidia-smi` lists, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield report_warning(f"GPU {number}", f"{description}: {parse_mib(used) / 1024:.1f} GiB are in use", cure)
    else:
        yield report_pass(f"GPU {number}", description)
    if mig == "Enabled":
        yield report_warning(
            f"GPU {number}",
            "is partitioned (MIG)",
            "each rank sees one partition, and NCCL cannot connect partitions of the same GPU",
        )
    if errors.isdecimal() and int(errors) > 0:
        yield report_failure(
            f"GPU {number}",
            f"{errors} uncorrected memory errors",
            "restart the host, or replace the GPU",
        )


def parse_mib(text: str) -> int:
    """Parse a number of MiB from nvidia-smi's output; return 0 if it is not a number."""
    return int(text) if text.isdecimal() else 0


def check_driver_responds() -> Iterator[DoctorFinding]:
    """Report a driver that hangs or fails, which would otherwise look like a machine without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return
    code, text = run_program(["nvidia-smi", "-L"], SECONDS)
    if code == 124:
        yield report_failure("driver", f"nvidia-smi does not respond within {SECONDS} s", "restart the host")
    elif code:
        yield report_failure(
            "driver", f"nvidia-smi: {find_last_line(text)}", "reinstall the NVIDIA driver, or restart the host"
        )
