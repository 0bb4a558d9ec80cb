"""Losses of diffusion policies, compared with hand-computed values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsreason.world.losses import (
    average_free,
    compute_exponential,
    compute_flow_matching_loss,
    compute_group_advantages,
    compute_kl_mean,
    compute_kl_velocity,
    compute_nft_decay,
    compute_nft_loss,
    compute_optimality,
    compute_policy_loss,
)


def clips(*values: list[float]) -> Tensor:
    """Build a float64 tensor `[B, 1, 1, 1, N]`."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None, None]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rewards", "std", "clip", "expected"),
    [
        ([[1, 0, 0, 0]], "group", 5, [[1.49970006, -0.49990002, -0.49990002, -0.49990002]]),
        ([[1, 0, 0, 0]], "group", 1, [[1, -0.49990002, -0.49990002, -0.49990002]]),
        # std of 1, 0, 3, 3 with n - 1 is 1.5
        ([[1, 0], [3, 3]], "batch", 5, [[0.5 / 1.5001, -0.5 / 1.5001], [0, 0]]),
        # 0.1 · 3 / 3 is not 0.1: still exactly 0
        ([[0.1, 0.1, 0.1]], "group", 5, [[0, 0, 0]]),
    ],
)
def test_advantages_are_normalized_within_group(
    rewards: list[list[float]], std: str, clip: float, expected: list[float]
) -> None:
    advantages = compute_group_advantages(torch.tensor(rewards, dtype=torch.float64), std=std, clip=clip)  # type: ignore[arg-type]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=1e-6)


def test_equal_rewards_give_zero_advantages() -> None:
    assert compute_group_advantages(torch.full((2, 3), 0.1), std="group", clip=5).tolist() == [[0.0] * 3] * 2


def test_exponential_advantages_match_formula() -> None:
    torch.testing.assert_close(compute_exponential(vector(0, 1, -1)), vector(-1, -0.36787944, -2.71828183))


def test_policy_loss_matches_hand_computed_values() -> None:
    result = compute_policy_loss(vector(-1.2, -0.9), vector(-1.2001, -0.8), vector(1.5, -1.0), 1e-4)
    torch.testing.assert_close(result.ratio, vector(1.000100005, 0.904837418))
    torch.testing.assert_close(result.loss, vector(-1.50015, 0.9999))
    assert result.clipped.tolist() == [True, True]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.2, True),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.5, -1.0, 1.5, False),
        (1.2840254166877414, 0.5, -0.6, True),
        (0.9900498337491681, -2.0, 1.9800996674983362, False),
    ],
)
def test_clipping_stops_further_movement_in_same_direction(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    result = compute_policy_loss(vector(ratio).log(), vector(0.0), vector(advantage), 0.2)
    assert (result.loss.item(), result.clipped.item()) == (pytest.approx(loss), clipped)


def test_on_policy_gradient_is_advantage_weighted() -> None:
    log_prob = vector(-1.0, 0.5).requires_grad_()
    result = compute_policy_loss(log_prob, log_prob.detach(), vector(2.0, -3.0), 1e-4)
    result.loss.sum().backward()
    assert result.ratio.tolist() == [1.0, 1.0]
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [-2.0, 3.0]


def test_kl_of_means_and_velocities_matches_formula() -> None:
    mean, reference = clips([0.63, -1.57]), clips([0.60, -1.50])
    assert compute_kl_mean(mean, reference, 0.626099).item() == pytest.approx(0.00369898, rel=1e-5)
    # without the root of the step's length (0.2) in the divisor it is five times smaller
    assert compute_kl_mean(mean, reference, 0.626099 / 0.2**0.5).item() == pytest.approx(0.00073980, rel=1e-4)
    assert compute_kl_velocity(clips([0.5, 0.25]), clips([0.4, 0.45])).item() == pytest.approx(0.025)
    mean, reference = clips([0.12, -0.5, 2.0]), clips([0.1, -0.2, 1.7])
    assert compute_kl_mean(mean, reference, 0.313).item() == pytest.approx(0.306899801637933, rel=1e-12)
    assert compute_kl_velocity(mean, reference).item() == pytest.approx(0.0601333333333333, rel=1e-12)


def test_velocity_error_equals_weighted_clip_error() -> None:
    clean, noise, s = clips([1.0, -1.0]), clips([0.5, 0.25]), 0.75
    velocity = clips([-0.4, 1.1])
    error = compute_flow_matching_loss(velocity, clean, noise).item()
    assert error == pytest.approx(0.01625)
    sigma = s / (1 - s)  # the form of EDM, where x = (1 - s)(clean + sigma · noise)
    result = (1 - s) * (clean + sigma * noise) - s * velocity
    assert (1 + sigma) ** 2 / sigma**2 * average_free((result - clean) ** 2, None).item() == pytest.approx(error)


CLEAN, NOISE, S = clips([1.0, -1.0]), clips([0.5, 0.25]), 0.4
OLD, REFERENCE = clips([-0.4, 1.2]), clips([-0.5, 1.1])


def nft(velocity: Tensor, optimal: float, beta: float = 1.0) -> Tensor:
    noisy = (1 - S) * CLEAN + S * NOISE
    result = compute_nft_loss(
        velocity, OLD, noisy=noisy, clean=CLEAN, times=vector(S), optimal=vector(optimal), beta=beta, scale=5
    )
    return result.loss + 1e-4 * compute_kl_velocity(velocity, REFERENCE)


def test_nft_loss_matches_hand_computed_values() -> None:
    velocity = clips([-0.6, 1.0]).requires_grad_()
    assert compute_optimality(vector(2.0, 9.0, -9.0), 5).tolist() == pytest.approx([0.7, 1.0, 0.0])
    noisy = (1 - S) * CLEAN + S * NOISE
    torch.testing.assert_close(noisy, clips([0.8, -0.5]))
    result = compute_nft_loss(
        velocity, OLD, noisy=noisy, clean=CLEAN, times=vector(S), optimal=vector(0.7), beta=1.0, scale=5
    )
    assert [result.positive.item(), result.negative.item()] == pytest.approx([0.08285714, 0.1])
    assert result.loss.item() == pytest.approx(0.44)
    total = nft(velocity, 0.7)
    total.sum().backward()
    assert total.item() == pytest.approx(0.440001)
    assert velocity.grad is not None
    assert velocity.grad.flatten().tolist() == pytest.approx([-1.60001, -2.40001])


@pytest.mark.parametrize(
    ("beta", "optimal", "scale", "s", "parts", "gradient"),
    [
        (0.1, 0.3, 5, 0.75, (0.0935, 0.1341, 6.096), (-0.84, -1.14, 1.02)),
        (
            0.5,
            0.9,
            2,
            0.25,
            (0.01875, 0.0763888888888889, 0.0980555555555556),
            (-0.252777777777778, 0.186111111111111, 0.483333333333333),
        ),
    ],
)
def test_nft_loss_matches_formula_for_other_betas(
    beta: float, optimal: float, scale: float, s: float, parts: tuple[float, ...], gradient: tuple[float, ...]
) -> None:
    clean, noise = clips([0.2, -0.6, 1.1]), clips([-1.0, 0.4, 0.3])
    velocity, old = clips([-1.4, 0.9, -0.5]).requires_grad_(), clips([-1.1, 1.2, -0.9])
    result = compute_nft_loss(
        velocity,
        old,
        noisy=(1 - s) * clean + s * noise,
        clean=clean,
        times=vector(s),
        optimal=vector(optimal),
        beta=beta,
        scale=scale,
    )
    result.loss.sum().backward()
    assert [result.positive.item(), result.negative.item(), result.loss.item()] == pytest.approx(parts, rel=1e-12)
    assert velocity.grad is not None
    assert velocity.grad.flatten().tolist() == pytest.approx(gradient, rel=1e-9)


@pytest.mark.parametrize(
    ("optimal", "gradient"), [(0.5, [0, 0]), (0.7, [1.0666667, -0.5333333]), (0.3, [-1.0666667, 0.5333333])]
)
def test_on_policy_nft_gradient_follows_reward(optimal: float, gradient: list[float]) -> None:
    velocity = OLD.clone().requires_grad_()
    noisy = (1 - S) * CLEAN + S * NOISE
    result = compute_nft_loss(
        velocity, OLD, noisy=noisy, clean=CLEAN, times=vector(S), optimal=vector(optimal), beta=1.0, scale=5
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(0.16666667)
    assert velocity.grad is not None
    assert velocity.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)


def test_each_reward_weights_its_own_clip() -> None:
    """Use rewards [1, 0], losses 2 and 4, and negative losses 1 and 2: the sum is 2 + 2, not that over all pairs."""
    clean = torch.zeros(2, 1, 1, 1, 1, dtype=torch.float64)
    # With s = 1 and x_s = 0 the estimates are -v±, and an adaptive loss is |v±|: v+ = v, v- = 2 v_old - v.
    velocity, old = clips([2.0], [4.0]), clips([1.5], [3.0])
    result = compute_nft_loss(
        velocity, old, noisy=clean, clean=clean, times=vector(1, 1), optimal=vector(1, 0), beta=1.0, scale=1
    )
    assert (result.positive.tolist(), result.negative.tolist()) == ([2, 4], [1, 2])
    assert result.loss.shape == (2,)
    assert result.loss.mean().item() == 2.0


@pytest.mark.parametrize("shape", [(2, 1), (1,), ()])
def test_rewards_of_wrong_shape_are_rejected(shape: tuple[int, ...]) -> None:
    values, other = torch.zeros(2), torch.zeros(shape)
    with pytest.raises(ValueError, match="one value per clip"):
        compute_policy_loss(values, values, other, 1e-4)
    zero = torch.zeros(2, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="one value per clip"):
        compute_nft_loss(zero, zero, noisy=zero, clean=zero, times=values, optimal=other, beta=1.0, scale=5)


def test_conditioning_frames_are_excluded_from_every_loss() -> None:
    free = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1, 1)
    values, other = torch.tensor([100.0, 3.0]).view(1, 1, 2, 1, 1), torch.tensor([7.0, 1.0]).view(1, 1, 2, 1, 1)
    assert average_free(values, free).tolist() == [3.0]
    assert compute_kl_velocity(values, other, free).tolist() == [4.0]
    assert compute_kl_mean(values, other, 1.0, free).tolist() == [2.0]
    assert compute_flow_matching_loss(values, torch.zeros_like(values), other, free).tolist() == [4.0]
    result = compute_nft_loss(
        values,
        values,
        noisy=other,
        clean=other * 0,
        times=torch.ones(1),
        optimal=torch.ones(1),
        beta=1.0,
        scale=1,
        free=free,
    )
    assert result.loss.tolist() == [2.0]  # |1 - 3|


@pytest.mark.parametrize(
    ("step", "slow", "late"),
    [(1, 0.001, 0), (50, 0.05, 0), (75, 0.075, 0), (76, 0.076, 0.0075), (100, 0.1, 0.1875), (500, 0.5, 0.999)],
)
def test_old_policy_decay_matches_schedules(step: int, slow: float, late: float) -> None:
    result = [compute_nft_decay(kind, step) for kind in ("none", "slow", "late")]  # type: ignore[arg-type]
    assert result == pytest.approx([0, slow, late])
