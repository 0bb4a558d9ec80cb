"""The offload's bookkeeping. Tests with real engines check that training continues unchanged."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dsreason.engine.offload import StateOffload
from dsreason.engine.rollout_memory import GIB, OffloadAmount, RolloutMemory


def test_gradient_buffers_survive_repeated_offload() -> None:
    """Include an optimizer that DeepSpeed keeps on the host."""
    engine = SimpleNamespace(device=torch.device("cpu"), optimizer=None)
    offload, bucket = StateOffload(engine, device_type="cpu"), torch.ones(1000)
    result = {"list_masters": [], "list_moments": [], "_list_weights": [], "list_gradients": [bucket]}
    with mock.patch.multiple(offload, **{name: mock.Mock(return_value=value) for name, value in result.items()}):
        offload.offload()
        offload.offload()
        assert bucket.untyped_storage().nbytes() == 0
        offload.reload()
        assert bucket.untyped_storage().nbytes() == 4000
        assert not bucket.any()
        bucket.fill_(1.0)
        offload.reload()
    assert bucket.all()  # values written in the meantime are kept


def build_offload(stack: ExitStack, amount: OffloadAmount, num_moments: int) -> StateOffload:
    """Build an offload of two master weights of 4,000 and 8,000 bytes, with some or none of their four moments."""
    engine = SimpleNamespace(device=torch.device("cpu"), optimizer=None, module=torch.nn.Linear(300, 10, bias=False))
    offload = StateOffload(engine, "cpu", amount)
    sizes = [1000, 1000, 2000, 2000][:num_moments]
    state = {
        "list_masters": [torch.ones(1000), torch.ones(2000)],
        "list_moments": [torch.ones(size) for size in sizes],
        "list_gradients": [torch.ones(500)],
    }
    mocks = {name: mock.Mock(return_value=tensors) for name, tensors in state.items()}
    stack.enter_context(mock.patch.multiple(offload, **mocks))
    return offload


@pytest.mark.parametrize(
    ("move_bytes", "num_moments", "names"),
    [
        (0, 4, []),
        (4001, 4, ["moments 0", "moments 1"]),
        (24_000, 4, ["moments 0", "moments 1", "moments 2", "moments 3"]),
        (24_001, 4, ["moments 0", "moments 1", "moments 2", "moments 3", "master weights 0"]),
        (24_000, 0, []),  # before the first step the moments' 24,000 bytes are free
        (24_001, 0, ["master weights 0"]),
    ],
)
def test_moments_move_before_master_weights(move_bytes: int, num_moments: int, names: list[str]) -> None:
    with ExitStack() as stack:
        assert list(build_offload(stack, OffloadAmount(True, move_bytes), num_moments).select_moving()) == names


@pytest.mark.parametrize("num_moments", [0, 4])
def test_measured_memory_counts_future_moments(num_moments: int) -> None:
    """Check the sum of 40,000,000 bytes in torch: 14,000 are master weights and gradients, and 24,000 moments if these exist."""
    with ExitStack() as stack:
        offload = build_offload(stack, OffloadAmount(True, 0), num_moments)
        stack.enter_context(mock.patch("dsreason.engine.offload.release_gathered"))
        readings = {"mem_get_info": (60 * GIB, 80 * GIB), "memory_allocated": 40_000_000, "memory_reserved": 3 * GIB}
        for name, value in readings.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=value))
        memory = offload.measure(0.5, 1000, num_ranks=2)
    assert memory == RolloutMemory(
        total=80 * GIB,
        vllm=40 * GIB,
        fixed=40_000_000 - 14_000 - (24_000 if num_moments else 0),
        gradients=2000,
        moments=24_000,
        masters=12_000,
        sync=2 * 12_000,  # the only weight is larger than the bucket
        outside=17 * GIB,  # 20 are in use, 3 by torch
    )
