"""Machines whose GPUs torch cannot use, which cause an error instead of training on the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dsreason.cli import main
from dsreason.errors import ConfigError
from dsreason.job import gpu, launch
from dsreason.job.ranks import init_world

TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver "
    "by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go "
    "to: https://pytorch.org. (Triggered internally at CUDAFunctions.cpp:119.)"
)
NOT_UP = (
    "CUDA initialization: Unexpected error. Error 802: system not yet initialized (Triggered internally at x.cpp:1.)"
)

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Return a function that fakes torch's view of the machine.

    It sets the GPUs that the driver lists, whether torch can use them, and the warnings of torch.
    """

    def make(
        count: int, *, usable: bool = False, warning: str = "", node: bool = True, cuda: str | None = "13.0"
    ) -> None:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=1)
            return usable

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(gpu, "has_gpu", lambda: node)

    for name in ("DS_ACCELERATOR", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    gpu.find_cuda_fault.cache_clear()
    yield make
    gpu.find_cuda_fault.cache_clear()


@pytest.mark.parametrize(
    ("count", "settings", "fault"),
    [
        (2, {"usable": True}, None),
        (0, {"node": False}, None),
        (0, {}, None),  # hidden by CUDA_VISIBLE_DEVICES
        (2, {"warning": TOO_OLD}, "The NVIDIA driver on your system is too old (found version 12040)"),
        (0, {"warning": NOT_UP}, "Unexpected error. Error 802: system not yet initialized"),
        (0, {"warning": NOT_UP, "node": False}, None),
        (2, {}, "the driver reports 2, but torch detects none"),
        (0, {"cuda": None}, None),
    ],
)
def test_unusable_gpus_are_detected_with_reason(
    machine: Machine, count: int, settings: dict[str, object], fault: str | None
) -> None:
    machine(count, **settings)
    assert gpu.find_cuda_fault() == fault


def test_gpu_error_names_required_driver_and_workaround(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(1, warning=TOO_OLD)
    text = r"too old \(found version 12040\) \(torch is built for CUDA 13.0, which needs .* 580 or newer\); .*DS_ACCELERATOR"
    with pytest.raises(ConfigError, match=text):
        gpu.check_gpus()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    gpu.check_gpus()


def test_rank_rejects_unusable_gpu_before_joining(machine: Machine) -> None:
    machine(0, warning=TOO_OLD)
    launch.prepare_environment()
    assert "DS_ACCELERATOR" not in os.environ  # the user has not set it
    with pytest.raises(ConfigError, match="driver on your system is too old"):
        init_world()


@pytest.mark.parametrize(
    "command",
    ["sft", "grpo", "eval --model tiny:qwen2_5_vl --adapter builtin", "infer --model m --image a.png --prompt ?"],
)
def test_command_exits_before_starting_ranks(
    machine: Machine, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(1, warning=TOO_OLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start_ranks", lambda *args, **options: pytest.fail("ranks were started"))
    monkeypatch.setattr("sys.argv", ["dsreason", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "error: torch" in capsys.readouterr().err
