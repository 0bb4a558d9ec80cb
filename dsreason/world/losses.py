"""Losses for training video diffusion models on rewards and on real clips.

Notation: x_s = (1 - s) x0 + s e with noise e; the network's velocity v estimates e - x0. All losses are per clip, `[B]`. Each is
a mean over the clip's free elements, so clips of any size have the same weight. The caller divides the losses' sum by the number
of clips in the step, over all ranks, so the split into micro-batches does not matter.

`free`, `[B, 1, T, 1, 1]`, is 1 for sampled latent frames and 0 for given frames; None means that all frames are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ADVANTAGE_EPS = 1e-4
MIN_WEIGHT = 1e-5
"""Lower bound of DiffusionNFT's adaptive weights."""


def average_free(values: Tensor, free: Tensor | None) -> Tensor:
    """Return the mean of each clip's free elements: `[B, C, T, h, w]` → `[B]`."""
    frames = values.mean(dim=(1, 3, 4))  # [B, T]
    if free is None:
        return frames.mean(1)
    weights = free.flatten(1).to(frames)
    return (frames * weights).sum(1) / weights.sum(1)


def compute_group_advantages(rewards: Tensor, *, std: Literal["group", "batch"], clip: float) -> Tensor:
    """Return (R - group mean) / (std + 1e-4), clipped at ± `clip`: `[P, G]` → `[P, G]` (Flow-GRPO, 2505.05470).

    The sample standard deviation (with divisor n - 1) is taken over the group or over all rewards. If all rewards in a group
    are equal, its advantages are exactly 0.

    Example: [1, 0, 0, 0] gives [1.49970, -0.49990, -0.49990, -0.49990].
    """
    spread = rewards.std(dim=1, keepdim=True) if std == "group" else rewards.std()
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + ADVANTAGE_EPS)
    return torch.where(find_equal_groups(rewards)[:, None], torch.zeros_like(advantages), advantages.clamp(-clip, clip))


def find_equal_groups(rewards: Tensor) -> Tensor:
    """Return which groups have only equal rewards and thus give no gradient: `[P, G]` → bool `[P]`."""
    return rewards.amax(dim=1) == rewards.amin(dim=1)


def compute_exponential(advantages: Tensor) -> Tensor:
    """Return -exp(-A) for advantages A of any shape (DDRL with the forward KL to the data, 2512.04332)."""
    return -torch.exp(-advantages)


@dataclass(frozen=True)
class ClipPolicyLoss:
    """Policy loss and diagnostics per clip, each `[B]`."""

    loss: Tensor
    ratio: Tensor
    """exp(log_prob - old_log_prob), detached."""
    clipped: Tensor
    """Whether clipping removes the gradient (bool)."""


def compute_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float
) -> ClipPolicyLoss:
    """Return max(-A r, -A clip(r, 1 ± clip_range)) with r = exp(log_prob - old_log_prob), all `[B]` (Flow-GRPO, 2505.05470).

    Example: log_prob -1.2 and -0.9, old_log_prob -1.2001 and -0.8, A = 1.5 and -1, clip_range = 1e-4 → -1.50015 and 0.9999.
    """
    check_shapes(log_prob, old_log_prob, advantages)
    ratio = torch.exp(log_prob - old_log_prob)
    plain, limited = -advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(plain, limited)
    return ClipPolicyLoss(loss, ratio.detach(), (limited > plain).detach())


def compute_kl_velocity(velocity: Tensor, reference: Tensor, free: Tensor | None = None) -> Tensor:
    """Return mean((v - v_ref)²): `[B, C, T, h, w]` → `[B]`.

    This is the KL between the two models' sampling steps, reweighted so that the weight does not depend on s.
    """
    return average_free((velocity - reference) ** 2, free)


def compute_kl_mean(mean: Tensor, reference: Tensor, std: float, free: Tensor | None = None) -> Tensor:
    """Return the KL per element between two Gaussian steps with equal standard deviation: mean((m - m_ref)²) / (2 std²), `[B]`.

    `std` includes the square root of the step's length. Example: means [.63, -1.57] and [.60, -1.50], std .626099 → 0.00369898.
    """
    return average_free((mean - reference) ** 2, free) / (2 * std**2)


def compute_flow_matching_loss(velocity: Tensor, clean: Tensor, noise: Tensor, free: Tensor | None = None) -> Tensor:
    """Return mean((v - (e - x0))²): `[B, C, T, h, w]` → `[B]` (rectified flow, 2209.03003)."""
    return average_free((velocity - (noise - clean)) ** 2, free)


def compute_optimality(advantages: Tensor, clip: float) -> Tensor:
    """Return DiffusionNFT's r in [0, 1]: A / (2 clip) + ½ with A clipped at ± `clip`. Example: A = 2 and clip = 5 → 0.7."""
    return (advantages.clamp(-clip, clip) / clip / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True)
class NFTLoss:
    """DiffusionNFT's loss per clip (`[B]`, scaled as in the paper's code), and its two terms, which are only logged."""

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
    """Return the loss of DiffusionNFT (2509.16117): good clips train the policy; bad clips train an implicit negative policy.

    v+ = beta v + (1 - beta) v_old, v- = (1 + beta) v_old - beta v; L± = mean((x_s - s v± - x0)² / w±) with the weight
    w± = max(mean |x_s - s v± - x0|, 1e-5) without gradient; loss = scale · (r L+ + (1 - r) L-) / beta.

    Args:
        velocity: v, `[B, C, T, h, w]`, with gradient.
        old_velocity: v_old, the old policy's velocity, without gradient.
        noisy: x_s.
        clean: x0, the sampled clip.
        times: s of each clip, `[B]`.
        optimal: r of each clip, `[B]`; see `compute_optimality`.
        scale: clipping bound of the advantages (5 by default).
    """
    check_shapes(times, optimal)
    s = times.view(-1, 1, 1, 1, 1)

    def weighted(implicit: Tensor) -> Tensor:
        error = noisy - s * implicit - clean
        weight = average_free(error.detach().abs(), free).clamp(min=MIN_WEIGHT)
        return average_free(error**2, free) / weight

    positive = weighted(beta * velocity + (1 - beta) * old_velocity)
    negative = weighted((1 + beta) * old_velocity - beta * velocity)
    check_shapes(optimal, positive)  # broadcasting `[B]` with `[B, 1]` would weight every clip with every reward
    loss = scale * (optimal * positive + (1 - optimal) * negative) / beta
    return NFTLoss(loss, positive.detach(), negative.detach())


def compute_nft_decay(kind: Literal["none", "slow", "late"], step: int) -> float:
    """Return the decay d of the old policy after optimizer step `step`, counted from 1: old ← d · old + (1 - d) · new.

    For `none`, d is 0; for `slow`, min(0.001 step, 0.5); for `late`, 0 up to step 75, then min(0.0075 (step - 75), 0.999).
    """
    if kind == "slow":
        return min(0.001 * step, 0.5)
    return min(max(0.0075 * (step - 75), 0.0), 0.999) if kind == "late" else 0.0


def check_shapes(*values: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape `[B]`, because broadcasting would mix up the clips of a batch."""
    shapes = [tuple(value.shape) for value in values]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"all tensors must have one value per clip, [B]; got the shapes {shapes}")
