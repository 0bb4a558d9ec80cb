"""The SFT loss compared with hand-computed values."""

import pytest
import torch

from dsreason.losses.sft import compute_sft_loss


def test_loss_is_mean_over_global_tokens():
    assert compute_sft_loss(torch.tensor([-1.0, -3.0]), num_tokens=4).item() == 1.0


def test_micro_batch_losses_sum_to_global_mean():
    # one right token (0.239545) and one wrong (2.239545): mean 1.239545
    parts = [torch.tensor([-0.239545]), torch.tensor([-2.239545])]
    assert sum(compute_sft_loss(p, num_tokens=2).item() for p in parts) == pytest.approx(1.239545)


@pytest.mark.parametrize("num_tokens", [5, 0])  # trained tokens on other ranks, or none at all
def test_loss_is_zero_without_trained_tokens(num_tokens):
    weight = torch.ones(3, requires_grad=True)
    loss = compute_sft_loss((weight * 2)[:0], num_tokens=num_tokens)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(weight.grad, torch.zeros(3))
