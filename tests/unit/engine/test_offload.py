"""The offload's bookkeeping; that training is the same afterwards is shown on real engines."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch

from dsreason.engine.offload import StateOffload


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
