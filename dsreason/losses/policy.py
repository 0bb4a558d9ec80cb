"""Policy-gradient losses, one function per variant.

A `clip_low` or `clip_high` of infinity clips nothing on that side. A micro-batch without tokens gives a loss of 0 that
is still connected to the graph.

Notation: r = exp(logprobs - old_logprobs), A advantage, sg stops the gradient, clip(r) = clamp(r, 1 - clip_low,
1 + clip_high), o_i a sequence and |o_i| its number of tokens. Formulas are objectives J; the loss is -J.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsreason.losses.sequences import average_by_sequence, count_sequence_tokens

# e^20 is past any clip and still finite: an infinite ratio would turn the clipped gradient into 0 * inf = nan.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class GlobalCounts:
    """Sizes of the global batch of one optimizer step: all ranks, all micro-batches.

    Tokens and sequences that the overlong filter leaves out are not counted. `max_length` is the constant that Dr.GRPO
    divides by: the length limit of a sampled completion.

    Example: sequences of 5, 3 and (filtered) 8 tokens: `GlobalCounts(num_tokens=8, num_sequences=2, max_length=8)`.
    """

    num_tokens: int
    num_sequences: int
    max_length: int


@dataclass(frozen=True)
class LossInputs:
    """A flat micro-batch of whole sequences with `N` tokens in total."""

    logprobs: Tensor
    """`[N]` log-probabilities under the policy being trained, with gradient."""
    old_logprobs: Tensor
    """`[N]` log-probabilities under the policy before the update, detached; `logprobs.detach()` with one update per rollout."""
    advantages: Tensor
    """`[N]`: the advantage of each token's sequence."""
    sequence: Tensor
    """`[N]` int64: index of the token's sequence within the micro-batch."""
    counts: GlobalCounts
    """Normalisers of the loss: its sum over all micro-batches of all ranks is the loss of the global batch, however it is cut."""
    correction: Tensor | None = None
    """`[N]` detached trainer/engine weights (`losses.corrections`); they multiply the clipped objective."""
    penalty: Tensor | None = None
    """`[N]`, added to the loss of each token and averaged with it: kl_coef * kl - entropy_coef * entropy."""


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of a micro-batch, and which of its tokens were clipped."""

    loss: Tensor
    """Scalar, with gradient."""
    clipped: Tensor
    """Bool `[N]`: tokens whose update was clipped."""


def grpo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> MicroBatchLoss:
    """GRPO (2402.03300): J = mean_i 1/|o_i| Σ_t min(r A, clip(r) A); every sequence weighs the same.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1]: ((1.2 + 0.5) / 2 - 1) / 2 = -0.075, a loss of 0.075.
    """
    losses, clipped = _compute_clipped_losses(
        inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip
    )
    losses = losses / count_sequence_tokens(inputs.sequence)
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_sequences, 1), clipped)


def dr_grpo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> MicroBatchLoss:
    """Dr.GRPO (2503.20783): J = mean_i 1/max_length Σ_t min(r A, clip(r) A); weights do not depend on lengths.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1], max_length 4: (1.2 + 0.5 - 1) / (2 * 4) = 0.0875, a loss of -0.0875.
    """
    losses, clipped = _compute_clipped_losses(
        inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip
    )
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_sequences * inputs.counts.max_length, 1), clipped)


def dapo_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> MicroBatchLoss:
    """DAPO (2503.14476): J = 1 / Σ_i |o_i| Σ_i Σ_t min(r A, clip(r) A); every token of the global batch weighs the same.

    Example: r [1.5, 0.5 | 1] with A [1, 1 | -1]: (1.28 + 0.5 - 1) / 3 = 0.26, a loss of -0.26.
    """
    losses, clipped = _compute_clipped_losses(
        inputs.logprobs - inputs.old_logprobs, inputs, clip_low, clip_high, dual_clip
    )
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_tokens, 1), clipped)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> MicroBatchLoss:
    """GSPO (2507.18071): J = mean_i min(s_i A_i, clip(s_i) A_i) with s_i = exp(1/|o_i| Σ_t log r_t).

    A sequence is clipped as a whole. Correction weights and penalties are averaged over its tokens.

    Example: r [4, 1 | 1] gives s [2 | 1]; with A [1 | -1] and clip_high 0.5: (1.5 - 1) / 2 = 0.25, a loss of -0.25.
    """
    log_ratio = average_by_sequence(inputs.logprobs - inputs.old_logprobs, inputs.sequence)
    losses, clipped = _compute_clipped_losses(log_ratio, inputs, clip_low, clip_high)
    losses = losses / count_sequence_tokens(inputs.sequence)
    return MicroBatchLoss(losses.sum() / max(inputs.counts.num_sequences, 1), clipped)


def cispo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> MicroBatchLoss:
    """CISPO (MiniMax-M1, 2506.13585): J = 1 / Σ_i |o_i| Σ_i Σ_t sg(clip(r)) A log π; no token loses its gradient.

    The paper has no lower bound and does not give the upper one; in ScaleRL (2510.13786) maximum weights of 4 to 8 work.

    Example: r [1.5, 0.5 | 1], A [1, 1 | -1], log π [-1, -2 | -3], clip_high 0.2: (-1.2 - 1 + 3) / 3, a loss of -0.2667.
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
    """Return the losses `[N]` of the objective min(r A, clip(r) A), and bool `[N]`, true if clipped (PPO, 1707.06347).

    With `dual_clip` c (1912.09729; usually c = 3) the objective of tokens with A < 0, for which r is otherwise unbounded,
    is at least c A.
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
