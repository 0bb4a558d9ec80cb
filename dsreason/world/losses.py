"""Losses for training diffusion models of clips by rewards and on real clips.

Notation: x_s = (1 - s) x0 + s e with noise e, a network's velocity v estimates e - x0. All losses are per clip, `[B]`:
the mean over a clip's free elements, so that clips of any size count alike. The caller divides their sum by the number of
clips of the whole step, over all ranks, and thus the cut of the batch does not matter.

`free`, `[B, 1, T, 1, 1]`, is 1 for latent frames that are sampled and 0 for those that are given; None: all are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ADVANTAGE_EPS = 1e-4
MIN_WEIGHT = 1e-5
"""Smallest scale of DiffusionNFT's adaptive weights."""


def free_mean(values: Tensor, free: Tensor | None) -> Tensor:
    """Mean of each clip's free elements: `[B, C, T, h, w]` → `[B]`."""
    frames = values.mean(dim=(1, 3, 4))  # [B, T]
    if free is None:
        return frames.mean(1)
    weights = free.flatten(1).to(frames)
    return (frames * weights).sum(1) / weights.sum(1)


def group_advantages(rewards: Tensor, *, std: Literal["group", "batch"], clip: float) -> Tensor:
    """(R - mean of the group) / (std + 1e-4), clipped at ± `clip`: `[P, G]` → `[P, G]` (Flow-GRPO, 2505.05470).

    The standard deviation (of a sample: divided by n - 1) is the group's own, or that of all rewards. A group whose rewards
    are all equal gets exactly 0.

    Example: [1, 0, 0, 0] gives [1.49970, -0.49990, -0.49990, -0.49990].
    """
    spread = rewards.std(dim=1, keepdim=True) if std == "group" else rewards.std()
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + ADVANTAGE_EPS)
    return torch.where(find_equal_groups(rewards)[:, None], torch.zeros_like(advantages), advantages.clamp(-clip, clip))


def find_equal_groups(rewards: Tensor) -> Tensor:
    """Return which groups have nothing to learn from, because all of their rewards are equal: `[P, G]` → bool `[P]`."""
    return rewards.amax(dim=1) == rewards.amin(dim=1)


def compute_exponential(advantages: Tensor) -> Tensor:
    """A → -exp(-A), of any shape (DDRL, 2512.04332: the forward form of the KL to the data)."""
    return -torch.exp(-advantages)


@dataclass(frozen=True)
class ClipPolicyLoss:
    """Per clip, `[B]`."""

    loss: Tensor
    ratio: Tensor
    """exp(log_prob - old_log_prob), detached."""
    clipped: Tensor
    """bool: where the clip holds the gradient back."""


def compute_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float
) -> ClipPolicyLoss:
    """max(-A r, -A clip(r, 1 ± clip_range)) with r = exp(log_prob - old_log_prob), all `[B]` (Flow-GRPO, 2505.05470).

    Example: log-probabilities -1.2 and -0.9, old ones -1.2001 and -0.8, A 1.5 and -1, clip 1e-4 → -1.50015, 0.9999.
    """
    check_shapes(log_prob, old_log_prob, advantages)
    ratio = torch.exp(log_prob - old_log_prob)
    plain, limited = -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(plain, limited)
    return ClipPolicyLoss(loss, ratio.detach(), (limited > plain).detach())


def compute_kl_velocity(velocity: Tensor, reference: Tensor, free: Tensor | None = None) -> Tensor:
    """mean((v - v_ref)²): `[B, C, T, h, w]` → `[B]`; proportional to the KL of the steps with weights that s does not change."""
    return free_mean((velocity - reference) ** 2, free)


def compute_kl_mean(mean: Tensor, reference: Tensor, std: float, free: Tensor | None = None) -> Tensor:
    """KL of two Gaussian steps of one standard deviation, per element: mean((m - m_ref)²) / (2 std²), `[B]`.

    `std` holds the root of the step's length. Example: [.63, -1.57] against [.60, -1.50], std .626099 → 0.00369898.
    """
    return free_mean((mean - reference) ** 2, free) / (2 * std**2)


def compute_flow_matching_loss(velocity: Tensor, clean: Tensor, noise: Tensor, free: Tensor | None = None) -> Tensor:
    """mean((v - (e - x0))²): `[B, C, T, h, w]` → `[B]` (rectified flow, 2209.03003)."""
    return free_mean((velocity - (noise - clean)) ** 2, free)


def compute_optimality(advantages: Tensor, clip: float) -> Tensor:
    """r in 0 … 1 of DiffusionNFT: advantages clipped at ± `clip`, over 2 clip, plus a half. Example: 2 with clip 5 → 0.7."""
    return (advantages.clamp(-clip, clip) / clip / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True)
class NFTLoss:
    """Per clip, `[B]`. `loss` is scaled as in the paper's code; the parts are shown."""

    loss: Tensor
    positive: Tensor
    negative: Tensor


def compute_nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    *,
    noisy: Tensor,
    clean: Tensor,
    times: Tensor,
    optimal: Tensor,
    beta: float,
    scale: float,
    free: Tensor | None = None,
) -> NFTLoss:
    """DiffusionNFT (2509.16117): the better clips pull the policy, the worse ones push an implicit negative of it.

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v; L± = mean((x_s - s v± - x0)² / w±) with the weight
    w± = max(mean |x_s - s v± - x0|, 1e-5) without gradient; loss = scale · (r L+ + (1 - r) L-) / beta.

    Args:
        velocity: `[B, C, T, h, w]`, with gradient.
        old_velocity: the same of the old policy, without.
        noisy: x_s.
        clean: x0, the sampled clip.
        times: s of each clip, `[B]`.
        optimal: r of each clip, `[B]`, see `compute_optimality`.
        scale: the advantages' clip (5).
    """
    check_shapes(times, optimal)
    s = times.view(-1, 1, 1, 1, 1)

    def weighted(implicit: Tensor) -> Tensor:
        error = noisy - s * implicit - clean
        weight = free_mean(error.detach().abs(), free).clamp(min=MIN_WEIGHT)
        return free_mean(error**2, free) / weight

    positive = weighted(beta * velocity + (1 - beta) * old_velocity)
    negative = weighted((1 + beta) * old_velocity - beta * velocity)
    check_shapes(optimal, positive)  # `[B]` and `[B, 1]` would weigh every clip by every reward
    loss = scale * (optimal * positive + (1 - optimal) * negative) / beta
    return NFTLoss(loss, positive.detach(), negative.detach())


def compute_nft_decay(kind: Literal["none", "slow", "late"], step: int) -> float:
    """Share that the old policy keeps of itself after optimizer step `step`, from 1: old ← d · old + (1 - d) · new.

    none: 0; slow: min(0.001 step, 0.5); late: 0 up to step 75, then min(0.0075 (step - 75), 0.999).
    """
    if kind == "slow":
        return min(0.001 * step, 0.5)
    return min(max(0.0075 * (step - 75), 0.0), 0.999) if kind == "late" else 0.0


def check_shapes(*values: Tensor) -> None:
    """Raise ValueError if these are not all `[B]`: broadcasting would mix up the clips of a batch."""
    shapes = [tuple(value.shape) for value in values]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"one value for each clip is needed; the shapes are {shapes}")
