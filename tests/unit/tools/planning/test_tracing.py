"""Memory of pieces of a model on the meta device, against counts by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsreason.tools.planning.tracing import Traced, give_gradients_away, trace


def test_what_waits_for_the_backward_pass_is_counted() -> None:
    """relu keeps its result alone: 4 x 8 values of 2 bytes; what it was made of is gone."""
    result = trace(lambda given: (given * 2).relu(), (4, 8), torch.bfloat16)
    assert result.kept == 64


def test_the_peak_has_what_lives_at_the_same_time() -> None:
    """Result of the product and of relu, 64 bytes each, and forward alone nothing else."""
    assert trace(lambda given: (given * 2).relu(), (4, 8), torch.bfloat16, training=False) == Traced(0, 128)


def test_the_gradient_of_a_weight_counts_once_and_not_beside_the_next() -> None:
    """Backward of y = a(b(x)), 16 x 16 weights in fp32 and one row: 64 bytes a row, 1,024 a gradient."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False, device="meta") for _ in range(2)))
    give_gradients_away(model)
    assert 1024 <= trace(model, (1, 16), torch.float32).peak < 2 * 1024


def test_views_take_nothing() -> None:
    def run(given: Tensor) -> Tensor:
        return (given + 1).view(8, 4).t()

    assert trace(run, (4, 8), torch.float32, training=False).peak == 128
