"""What the report's look into vLLM's memory relies on, tried on host memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report.engines import spoil, tensors_within
from benchmarks.gpu_report.environment import queried


def test_tensors_in_an_address_range_are_found_frozen_ones_too_but_not_the_weights() -> None:
    weight, state, elsewhere = (torch.zeros(1000) for _ in range(3))
    part = weight[10:20]
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in (weight, state)]
    gc.freeze()
    found = tensors_within(ranges, [weight])
    assert [tensor is state for tensor in found] == [True]
    assert part.shape == (10,) and elsewhere.shape == (1000,)


@pytest.mark.parametrize(
    ("dtype", "worst"), [(torch.bfloat16, "nan"), (torch.int32, "1048576"), (torch.int8, "127"), (torch.bool, "True")]
)
def test_a_spoilt_tensor_holds_what_no_kernel_should_read(dtype: torch.dtype, worst: str) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    spoil(tensor)
    assert [str(value) for value in tensor.tolist()] == [worst] * 3


def test_a_field_of_nvidia_smi_is_read_for_each_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queried("driver_version") == "unknown: there is no nvidia-smi"
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$1 of card 0"\necho "$1 of card 1"\n')
    program.chmod(0o755)
    assert queried("name", 1) == "--query-gpu=name of card 1"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert queried("driver_version") == "unknown: nvidia-smi failed"
