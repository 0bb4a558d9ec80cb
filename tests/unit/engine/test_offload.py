"""The offload's bookkeeping; that training is the same afterwards is shown on real engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dsreason.engine.offload import StateOffload
from dsreason.engine.offload_need import GIB, bytes_to_free


@pytest.mark.parametrize(
    ("mode", "total", "sampler", "held", "need"),
    [
        ("always", 80, 40, 20, None),
        ("auto", 140, 56, 33, 0),
        ("auto", 80, 40, 38, 6),  # 38 + 40 + a margin of 4 + 80 / 20 on 80
        ("never", 80, 40, 32, 0),
    ],
)
def test_state_leaves_as_far_as_the_sampler_needs(
    mode: Any, total: int, sampler: int, held: int, need: int | None
) -> None:
    result = bytes_to_free(mode, total=total * GIB, sampler=sampler * GIB, held=held * GIB)
    assert result == (None if need is None else need * GIB)


def test_state_that_may_not_leave_must_fit() -> None:
    message = (
        r"training state \(33.0 GiB\), vLLM's share \(40.0 GiB, .*margin of 8.0 GiB do not fit on a GPU of 80.0 GiB"
    )
    with pytest.raises(ValueError, match=message):
        bytes_to_free("never", total=80 * GIB, sampler=40 * GIB, held=33 * GIB)


@pytest.mark.parametrize(
    ("need", "dropped", "moved"),
    [
        (0, 0, []),
        (4000, 1, []),
        (4001, 1, ["moments 1"]),
        (7000, 1, ["moments 1", "moments 0"]),
        (None, 1, ["master weights 0", "moments 0", "moments 1"]),
    ],
)
def test_gradients_leave_before_moments_and_moments_before_weights(
    need: int | None, dropped: int, moved: list[str]
) -> None:
    """Gradients of 4,000 bytes, moments of 2,000 each, master weights of 2,000."""
    engine = SimpleNamespace(device=torch.device("cpu"), optimizer=None)
    offload = StateOffload(engine, device_type="cpu", need=need)
    state = {"masters": [torch.ones(500)], "moments": [torch.ones(500), torch.full((500,), 2.0)]}
    parts = state | {"_weights": [], "gradients": [torch.ones(1000)]}
    with mock.patch.multiple(offload, **{name: mock.Mock(return_value=value) for name, value in parts.items()}):
        tensors, gradients = offload.chosen()
        assert (list(tensors), len(gradients)) == (moved, dropped)
        offload.offload()
        assert set(offload.away) == set(moved)
        offload.reload()
    assert all(bool((tensor == tensor.mean()).all()) and float(tensor.sum()) for tensor in state["moments"])


def test_gradient_buffers_outlive_two_trips_begun_in_a_row_where_nothing_else_is_on_the_device() -> None:
    """As with an optimizer that DeepSpeed keeps on the host."""
    engine = SimpleNamespace(device=torch.device("cpu"), optimizer=None)
    offload, bucket = StateOffload(engine, device_type="cpu"), torch.ones(1000)
    found = {"masters": [], "moments": [], "_weights": [], "gradients": [bucket]}
    with mock.patch.multiple(offload, **{name: mock.Mock(return_value=value) for name, value in found.items()}):
        offload.offload()
        offload.offload()
        assert bucket.untyped_storage().nbytes() == 0
        offload.reload()
        assert bucket.untyped_storage().nbytes() == 4000
        assert not bucket.any()
        bucket.fill_(1.0)
        offload.reload()
    assert bucket.all()  # what was written meanwhile stays
