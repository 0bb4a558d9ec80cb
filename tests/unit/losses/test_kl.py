"""KL estimators compared with hand-computed values."""

import math

import pytest
import torch

from dsreason.losses.kl import bias_corrected_k3, k1, k2, k3

LOGPROBS = torch.tensor([-1.0, -1.0, -2.0, -1.0])
D = torch.tensor([0.5, -0.5, 1.0, -1.0])


def test_k1_is_the_log_ratio():
    assert k1(LOGPROBS, LOGPROBS + D).tolist() == [-0.5, 0.5, -1.0, 1.0]


def test_k2_is_half_the_squared_log_ratio():
    assert k2(LOGPROBS, LOGPROBS + D).tolist() == [0.125, 0.125, 0.5, 0.5]


def test_k3_is_positive_and_not_clamped():
    # e^0.5 - 1.5, e^-0.5 - 0.5, e - 2, e^-1: cosmos-rl's too
    expected = [0.148721, 0.106531, 0.718282, 0.367879]
    assert k3(LOGPROBS, LOGPROBS + D).tolist() == pytest.approx(expected, abs=1e-6)
    # e^3 - 4. cosmos-rl returns 10; ours differs on purpose, because a clamp removes the gradient of these tokens.
    assert k3(torch.tensor([-4.0]), torch.tensor([-1.0])).item() == pytest.approx(16.085537)


def test_clamped_k3_matches_cosmos_rl():
    logprobs = torch.tensor([-1.0, -4.0, -201.0], requires_grad=True)
    values = k3(logprobs, torch.tensor([-0.5, -1.0, -1.0]), clamp=10)
    assert values.tolist() == pytest.approx([0.148721, 10, 10], abs=1e-6)
    values.sum().backward()
    # 1 - e^0.5; no gradient above the clamp, and no NaN from e^200 = inf
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(0.5), 0, 0])


def test_k3_keeps_precision_for_small_differences():
    # d = 2^-13, exact in float32 beside 1: d²/2 + d³/6
    value = k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-13])).item()
    assert value == pytest.approx(2**-27 + 2**-39 / 6, rel=1e-2)


def test_bias_corrected_k3_weights_by_importance_ratio():
    # e^0.1 * 0.148721, e^-0.2 * 0.106531
    logprobs, ref_logprobs, old_logprobs = torch.tensor([[-1.0, -1.0], [-0.5, -1.5], [-1.1, -0.8]])
    values = bias_corrected_k3(logprobs, ref_logprobs, old_logprobs)
    assert values.tolist() == pytest.approx([0.164363, 0.087220], abs=1e-6)
    assert bias_corrected_k3(torch.tensor([-4.0]), torch.tensor([-1.0]), torch.tensor([-4.0]), clamp=10).item() == 10


def test_estimator_gradients_match_hand_computed_values():
    # d = 0.5. k1: 1 whatever d is; k2: -d; k3: 1 - e^d; bias-corrected on-policy: -d, that of the KL
    ref_logprobs, old_logprobs = torch.tensor([-0.5]), torch.tensor([-1.0])
    gradients = []
    for kl in (k1, k2, k3, lambda p, q: bias_corrected_k3(p, q, old_logprobs)):
        logprobs = torch.tensor([-1.0], requires_grad=True)
        kl(logprobs, ref_logprobs).sum().backward()
        gradients.append(logprobs.grad.item())
    assert gradients == pytest.approx([1.0, -0.5, 1 - math.exp(0.5), -0.5])


def test_bias_corrected_gradient_matches_kl_off_policy():
    # Exact expectation over a vocabulary of three; plain k3 differs from it.
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([[0.0, 0.1, 0.5], [1.0, -1.0, 0.3]], dtype=torch.float64).log_softmax(dim=-1)
    policy = logits.log_softmax(dim=-1)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    expected = gradient((policy.exp() * (policy - ref)).sum())
    torch.testing.assert_close(gradient((old.exp() * bias_corrected_k3(policy, ref, old)).sum()), expected)
    assert not torch.allclose(gradient((old.exp() * k3(policy, ref)).sum()), expected, rtol=1e-2)
