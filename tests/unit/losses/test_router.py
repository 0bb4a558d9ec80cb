"""Balance loss and loads of a mixture of experts, computed by hand and by transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from dsreason.losses.router import compute_max_load, compute_routing


def test_balance_loss_matches_hand_computed_value() -> None:
    logits = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]).log()
    routing = compute_routing([logits], torch.tensor([True, True, False]), torch.tensor(2), 1)
    assert routing.balance_loss.item() == pytest.approx(2 * (1 * 0.85 + 0 * 0.15))
    assert routing.loads.tolist() == [[2, 0]]
    routing = compute_routing([logits], torch.tensor([True, True, True]), torch.tensor(3), 1)
    assert routing.balance_loss.item() == pytest.approx(2 * (2 / 3 * 2 / 3 + 1 / 3 * 1 / 3))


def test_balance_loss_matches_transformers_layer_by_layer() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(10, 8, requires_grad=True) for _ in range(3)]
    counted = torch.tensor([True] * 7 + [False] * 3)
    routing = compute_routing(logits, counted, counted.sum(), 2)
    expected = sum(load_balancing_loss_func((layer,), 8, 2, counted[None].long()) for layer in logits) / 3
    torch.testing.assert_close(routing.balance_loss, expected)
    for gradient, other in zip(
        torch.autograd.grad(routing.balance_loss, logits), torch.autograd.grad(expected, logits), strict=True
    ):
        torch.testing.assert_close(gradient, other)


def test_balance_loss_of_equal_loads_is_top_k() -> None:
    probs = torch.tensor([[0.4, 0.4, 0.1, 0.1], [0.1, 0.1, 0.4, 0.4]])
    routing = compute_routing([probs.log()], torch.tensor([True, True]), torch.tensor(2), 2)
    assert routing.balance_loss.item() == pytest.approx(2)
    assert compute_max_load(routing.loads) == 1


def test_max_load_is_that_of_the_fullest_layer() -> None:
    assert compute_max_load(torch.tensor([[3.0, 3.0, 3.0, 3.0], [9.0, 1.0, 1.0, 1.0]])) == 3
