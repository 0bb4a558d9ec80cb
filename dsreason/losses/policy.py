"""Policy-gradient losses, one function a variant.

A `clip_low` or `clip_high` of infinity clips nothing on that side. A micro-batch without tokens gives a loss of 0 that
still hangs on the graph.

Notation: r = exp(logprobs - old_logprobs), A advantage, sg stops the gradient, clip(r) = clamp(r, 1 - clip_low,
1 + clip_high), o_i a sequence and |o_i| its tokens. Formulas are objectives J; the loss is -J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsreason.losses.sequences import sequence_lengths, sequence_mean

# e^20 is past any clip and still finite: an infinite ratio would turn the clipped gradient into 0 * inf = nan.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of the global batch of one optimizer step: all ranks, all micro-batches.

    Tokens and sequences that are not trained (overlong filter) are not counted. `max_length` is the constant that
    Dr.GRPO divides by, the longest completion that may be sampled.

    Example: sequences of 5, 3 and a filtered 8 tokens: `GlobalCounts(num_tokens=8, num_sequences=2, max_length=8)`.
    """

    num_tokens: int
    num_sequences: int
    max_length: int


@dataclass(frozen=True)
class LossInputs:
    """A flat micro-batch of whole sequences, `N` tokens in all."""

    logprobs: Tensor
    """`[N]` of the policy being trained, with gradient."""
    old_logprobs: Tensor
    """`[N]` of the policy before the update, detached; `logprobs.detach()` with one update per rollout."""
    advantages: Tensor
    """`[N]`: each token has its sequence's advantage."""
    sequence: Tensor
    """`[N]` int64: index of the token's sequence within the micro-batch."""
    counts: GlobalCounts
    """With them the sum of the loss over every micro-batch of every rank is the loss of the global batch, however it was
    cut."""
    correction: Tensor | None = None
    """`[N]` detached trainer/engine weights (`losses.corrections`); they multiply the clipped objective."""
    penalty: Tensor | None = None
    """`[N]`, added to the loss of each token and averaged like it: kl_coef * kl, - entropy_coef * entropy."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a micro-batch (scalar, with gradient) and, detached, what the caller may log.

    `clipped` `[N]` marks the tokens whose update was clipped.
    """

    loss: Tensor
    clipped: Tensor


def grpo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """GRPO (2402.03300): J = mean_i 1/|o_i| Σ_t min(r A, clip(r) A); a long sequence weighs as much as a short one.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1]: ((1.2 + 0.5) / 2 - 1) / 2 = -0.075, a loss of 0.075.
    """
    losses, clipped = _clipped_losses(inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip)
    losses = losses / sequence_lengths(inputs.sequence)
    return PolicyLoss(losses.sum() / max(inputs.counts.num_sequences, 1), clipped)


def dr_grpo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """Dr.GRPO (2503.20783): J = mean_i 1/max_length Σ_t min(r A, clip(r) A); no weight depends on a length.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1], max_length 4: (1.2 + 0.5 - 1) / (2 * 4) = 0.0875, a loss of -0.0875.
    """
    losses, clipped = _clipped_losses(inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip)
    return PolicyLoss(losses.sum() / max(inputs.counts.num_sequences * inputs.counts.max_length, 1), clipped)


def dapo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """DAPO (2503.14476): J = 1 / Σ_i |o_i| Σ_i Σ_t min(r A, clip(r) A); every token of the global batch weighs the same.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1]: (1.28 + 0.5 - 1) / 3 = 0.26, a loss of -0.26.
    """
    losses, clipped = _clipped_losses(inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip)
    return PolicyLoss(losses.sum() / max(inputs.counts.num_tokens, 1), clipped)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """GSPO (2507.18071): J = mean_i min(s_i A_i, clip(s_i) A_i) with s_i = exp(1/|o_i| Σ_t log r_t).

    A sequence is clipped as a whole. Token weights and penalties are averaged over its tokens.

    Example: r [4, 1 | 1] gives s [2 | 1]; with A [1 | -1] and clip_high 0.5: (1.5 - 1) / 2 = 0.25, a loss of -0.25.
    """
    log_ratio = sequence_mean(inputs.logprobs - inputs.old_logprobs, inputs.sequence)
    losses, clipped = _clipped_losses(log_ratio, inputs, clip_low, clip_high)
    losses = losses / sequence_lengths(inputs.sequence)
    return PolicyLoss(losses.sum() / max(inputs.counts.num_sequences, 1), clipped)


def cispo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """CISPO (MiniMax-M1, 2506.13585): J = 1 / Σ_i |o_i| Σ_i Σ_t sg(clip(r)) A log π; no token loses its gradient.

    The paper has no lower bound and leaves the upper one open; ScaleRL (2510.13786) finds a largest weight of 4 to 8.

    Example: r [1.5, 0.5 | 1], A [1, 1 | -1], log π [-1, -2 | -3], clip_high 0.2: (-1.2 - 1 + 3) / 3, a loss of -0.2667.
    """
    ratio = _ratio(inputs.logprobs.detach() - inputs.old_logprobs)
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = _token_losses(weights * inputs.advantages * inputs.logprobs, inputs)
    clipped = (weights != ratio) & (inputs.advantages != 0)
    return PolicyLoss(losses.sum() / max(inputs.counts.num_tokens, 1), clipped)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_losses(
    log_ratio: Tensor, inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Losses `[N]` with the objective min(r A, clip(r) A), and bool `[N]` where that has no gradient (PPO, 1707.06347).

    With `dual_clip` c (1912.09729; c = 3 is usual) it is at least c A where A < 0: there r is otherwise unbounded.
    """
    ratio, advantages = _ratio(log_ratio), inputs.advantages
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    if dual_clip is not None:
        objective = torch.where(advantages < 0, objective.maximum(dual_clip * advantages), objective)
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return _token_losses(objective, inputs), clipped


def _token_losses(objective: Tensor, inputs: LossInputs) -> Tensor:
    losses = -objective if inputs.correction is None else -objective * inputs.correction
    return losses if inputs.penalty is None else losses + inputs.penalty
