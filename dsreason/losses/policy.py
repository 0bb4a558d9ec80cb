"""Policy-gradient losses, one function per variant.

If `clip_low` or `clip_high` is infinite, clipping is disabled on that side. The loss of a micro-batch without tokens is 0 but
still part of the autograd graph.

Notation: r = exp(logprobs - old_logprobs), A is the advantage, sg stops the gradient, clip(r) = clamp(r, 1 - clip_low,
1 + clip_high), o_i is a sequence and |o_i| its number of tokens. The formulas define objectives J; the loss is -J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsreason.losses.sequences import average_by_sequence, count_sequence_tokens

# e^20 is far above any clip but finite: an infinite ratio would turn the clipped gradient into 0 * inf = nan.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of an optimizer step's global batch, over all ranks and micro-batches.

    Tokens and sequences that the overlong filter removes are not counted. `max_length` is the maximum length of a sampled
    completion, by which Dr.GRPO divides.

    Example: for sequences with 5, 3 and 8 tokens, of which the last is filtered, the counts are
    `GlobalCounts(num_tokens=8, num_sequences=2, max_length=8)`.
    """

    num_tokens: int
    num_sequences: int
    max_length: int


@dataclass(frozen=True)
class LossInputs:
    """Inputs to a loss: a flat micro-batch of complete sequences, with `N` tokens in total."""

    logprobs: Tensor
    """`[N]` log-probabilities under the policy being trained; gradients flow through them."""
    old_logprobs: Tensor
    """`[N]` detached log-probabilities under the policy before the rollout's first update. If a rollout has only one update,
    they equal `logprobs.detach()`."""
    advantages: Tensor
    """`[N]` advantage of each token: its sequence's advantage plus, under distillation, a term for the token itself."""
    sequence: Tensor
    """`[N]` int64 index of each token's sequence within the micro-batch."""
    counts: GlobalCounts
    """Normalisers with which the losses of all micro-batches on all ranks add up to the global batch's loss, however the batch is
    divided."""
    correction: Tensor | None = None
    """`[N]` detached importance weights (`losses.corrections`) for the clipped objective; None disables the correction."""
    penalty: Tensor | None = None
    """`[N]` penalties, kl_coef * kl - entropy_coef * entropy, added to the token losses before averaging; None adds nothing."""


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of a micro-batch, and a mask that marks the clipped tokens."""

    loss: Tensor
    """Scalar loss through which gradients flow."""
    clipped: Tensor
    """Bool `[N]`: whether each token's update was clipped."""


def grpo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> MicroBatchLoss:
    """Compute the GRPO loss (2402.03300): J = mean_i 1/|o_i| Σ_t min(r A, clip(r) A).

    Every sequence has the same weight.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1] gives J = ((1.2 + 0.5) / 2 - 1) / 2 = -0.075, a loss of 0.075.
    """
    losses, clipped = _compute_clipped_losses(
        inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip
    )
    losses = losses / count_sequence_tokens(inputs.sequence)
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_sequences, 1), clipped)


def dr_grpo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> MicroBatchLoss:
    """Compute the Dr.GRPO loss (2503.20783): J = mean_i 1/max_length Σ_t min(r A, clip(r) A).

    A token's weight does not depend on the length of its sequence.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1] and max_length 4 gives J = (1.2 + 0.5 - 1) / (2 * 4) = 0.0875, a loss of
    -0.0875.
    """
    losses, clipped = _compute_clipped_losses(
        inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip
    )
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_sequences * inputs.counts.max_length, 1), clipped)


def dapo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> MicroBatchLoss:
    """Compute the DAPO loss (2503.14476): J = 1 / Σ_i |o_i| Σ_i Σ_t min(r A, clip(r) A).

    Every token in the global batch has the same weight.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1] and clip_high 0.28 gives J = (1.28 + 0.5 - 1) / 3 = 0.26, a loss of -0.26.
    """
    losses, clipped = _compute_clipped_losses(
        inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip
    )
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_tokens, 1), clipped)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> MicroBatchLoss:
    """Compute the GSPO loss (2507.18071): J = mean_i min(s_i A_i, clip(s_i) A_i) with s_i = exp(1/|o_i| Σ_t log r_t).

    All tokens in a sequence are clipped together. Correction weights and penalties are averaged over the tokens.

    Example: r [4, 1 | 1] gives s [2 | 1]; with A [1 | -1] and clip_high 0.5, J = (1.5 - 1) / 2 = 0.25, a loss of -0.25.
    """
    log_ratio = average_by_sequence(inputs.logprobs - inputs.old_logprobs, inputs.sequence)
    losses, clipped = _compute_clipped_losses(log_ratio, inputs, clip_low, clip_high)
    losses = losses / count_sequence_tokens(inputs.sequence)
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_sequences, 1), clipped)


def cispo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> MicroBatchLoss:
    """Compute the CISPO loss (MiniMax-M1, 2506.13585): J = 1 / Σ_i |o_i| Σ_i Σ_t sg(clip(r)) A log π.

    Every token keeps a gradient. The paper uses no lower bound and does not state the upper bound; ScaleRL (2510.13786)
    found that maximum weights from 4 to 8 work.

    Example: r [1.5, 0.5 | 1], A [1, 1 | -1], log π [-1, -2 | -3] and clip_high 0.2 give J = (-1.2 - 1 + 3) / 3, a loss of
    -0.2667.
    """
    ratio = _compute_ratio(inputs.logprobs.detach() - inputs.old_logprobs)
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = _compute_token_losses(weights * inputs.advantages * inputs.logprobs, inputs)
    clipped = (weights != ratio) & (inputs.advantages != 0)
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_tokens, 1), clipped)


def _compute_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _compute_clipped_losses(
    log_ratio: Tensor, inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute token losses `[N]` for the objective min(r A, clip(r) A) (PPO, 1707.06347), and a mask `[N]` of clipped tokens.

    `dual_clip` is a constant c (1912.09729; usually c = 3). For tokens with A < 0, the objective is then at least c A; without
    it, a large r could make the objective arbitrarily negative.
    """
    ratio, advantages = _compute_ratio(log_ratio), inputs.advantages
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    if dual_clip is not None:
        objective = torch.where(advantages < 0, objective.maximum(dual_clip * advantages), objective)
        clipped = clipped | ((advantages < 0) & (ratio > dual_clip))
    return _compute_token_losses(objective, inputs), clipped


def _compute_token_losses(objective: Tensor, inputs: LossInputs) -> Tensor:
    losses = -objective if inputs.correction is None else -objective * inputs.correction
    return losses if inputs.penalty is None else losses + inputs.penalty
