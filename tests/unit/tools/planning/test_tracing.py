"""Memory of parts of a model, traced on the meta device and compared with hand-computed values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsreason.tools.planning.tracing import Traced, free_gradients_early, trace


def test_tensors_kept_for_backward_are_counted() -> None:
    """Count only the result of relu, 4 x 8 values of 2 bytes; its input is gone."""
    result = trace(lambda given: (given * 2).relu(), (4, 8), torch.bfloat16)
    assert result.kept == 64


def test_peak_counts_simultaneously_live_tensors() -> None:
    """Count the results of the product and of relu, 64 bytes each; a forward pass without training keeps nothing."""
    assert trace(lambda given: (given * 2).relu(), (4, 8), torch.bfloat16, training=False) == Traced(0, 128)


def test_weight_gradients_are_counted_one_by_one() -> None:
    """Trace y = a(b(x)) backwards, with 16 x 16 fp32 weights and one row: 64 bytes per row, 1,024 per gradient."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False, device="meta") for _ in range(2)))
    free_gradients_early(model)
    assert 1024 <= trace(model, (1, 16), torch.float32).peak < 2 * 1024


def test_tensor_views_take_no_memory() -> None:
    def run(given: Tensor) -> Tensor:
        return (given + 1).view(8, 4).t()

    assert trace(run, (4, 8), torch.float32, training=False).peak == 128
