"""The machine: versions, driver, cards, links between the cards, and the speed of a card without dsreason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_report.parts import BenchmarkSetup, Value
from benchmarks.gpu_report.timing import measure_seconds

VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "NCCL_DEBUG")


def environment(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    import torch

    from dsreason.job.record import read_git_state, read_versions
    from dsreason.monitor.memory import count_available_bytes

    yield from read_versions().items()
    git = read_git_state()
    yield "commit", f"{git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "not a checkout"
    yield "cuDNN", str(torch.backends.cudnn.version())
    yield "CUDA that torch was built for", str(torch.version.cuda)
    yield "driver (CUDA 13 needs 580 or newer)", query_nvidia_smi("driver_version")
    yield "cores", len(os.sched_getaffinity(0))
    yield "host memory that can be had, GiB", count_available_bytes() / 2**30
    yield "disk free for models and runs, GiB", shutil.disk_usage(setup.scratch).free / 2**30
    yield from ((name, os.environ[name]) for name in VARIABLES if name in os.environ)
    if setup.cards:
        yield from iter_cards()
    yield from measure_speeds(setup)


def iter_cards() -> Iterator[tuple[str, Value]]:
    import torch

    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    yield "cards", torch.cuda.device_count()
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield f"card {number}", f"{card.name}, compute capability {card.major}.{card.minor}"
        yield f"card {number}: memory, GiB", total / 2**30
        yield f"card {number}: in use before anything ran, GiB", (total - free) / 2**30
        yield f"card {number}: power limit", query_nvidia_smi("power.limit", number)
    for peer in range(1, torch.cuda.device_count()):
        yield f"card 0 reads card {peer} directly", torch.cuda.can_device_access_peer(0, peer)


def query_nvidia_smi(field: str, number: int = 0) -> str:
    """Return the value that nvidia-smi reports for a field of card `number`."""
    if shutil.which("nvidia-smi") is None:
        return "unknown: nvidia-smi is missing"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=30)
    lines = completed.stdout.strip().splitlines()
    return lines[min(number, len(lines) - 1)] if completed.returncode == 0 and lines else "unknown: nvidia-smi failed"


def measure_speeds(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Yield speeds of this machine that are upper bounds for training and weight sync."""
    import torch

    device, side, size = setup.device, *((256, 2**20) if setup.tiny else (8192, 2**31))
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    yield f"bf16 matrix product of {side}, TFLOP/s", 2 * side**3 / measure_seconds(lambda: matrix @ matrix) / 1e12
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    yield "copy on the device, GB/s", size / measure_seconds(lambda: target.copy_(source)) / 1e9
    if setup.cards:
        for kind, pinned in (("pinned", True), ("pageable", False)):
            host = torch.zeros(size // 4, dtype=torch.uint8, pin_memory=pinned)
            seconds = measure_seconds(partial(host.copy_, target[: size // 4]))
            yield f"copy from the device to {kind} memory, GB/s", len(host) / seconds / 1e9
