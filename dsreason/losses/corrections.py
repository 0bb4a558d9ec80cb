"""Importance weights that correct for differences between the trainer's and the rollout engine's probabilities.

The trainer and vLLM assign slightly different probabilities to the same token, so the samples are off-policy even before
the first update. Each weight is computed from the ratio w = π_old / π_rollout and multiplies its token's clipped objective.
Weights are detached.

All functions take `log_ratio = old_logprobs - rollout_logprobs` `[N]` and `sequence` `[N]`, the index of each token's
sequence within the micro-batch (used only by the sequence variants), and return weights `[N]`. A weight of 0 removes a
token from the objective but not from the normaliser, so masking some tokens does not increase the weight of the others.

The weights are valid only for samples from the full distribution, because top-p and top-k renormalise the engine's
probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsreason.losses.sequences import average_by_sequence, sum_by_sequence


def token_truncate(log_ratio: Tensor, sequence: Tensor, *, low: float = 0.0, high: float = 2.0) -> Tensor:
    """Return w_t clamped to [low, high]: truncated importance sampling (TIS, https://fengyao.notion.site/off-policy-rl).

    Example: w [1, 3, 0.25] gives [1, 2, 0.25].
    """
    return log_ratio.detach().exp().clamp(low, high)


def token_mask(log_ratio: Tensor, sequence: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """Return w_t if low <= w_t <= high, else 0 (IcePop, 2510.18855). With low = 0, this is masked importance sampling (MIS).

    Example: w [1, 3, 0.25] gives [1, 3, 0].
    """
    return _keep_inside(log_ratio.detach().exp(), low, high)


def sequence_truncate(log_ratio: Tensor, sequence: Tensor, *, low: float = 0.0, high: float = 3.0) -> Tensor:
    """Return w = Π_t w_t over the token's sequence, clamped to [low, high].

    Example: in one sequence, w_t = [1, 8, 0.5] has the product 4 and gives [3, 3, 3].
    """
    return sum_by_sequence(log_ratio.detach(), sequence).exp().clamp(low, high)


def sequence_mask(log_ratio: Tensor, sequence: Tensor, *, low: float = 0.0, high: float = 3.0) -> Tensor:
    """Return w = Π_t w_t over the token's sequence if low <= w <= high, else 0 (TRL's default).

    The longer a sequence, the further the product drifts from 1, so long sequences are more likely to be masked.

    Example: in one sequence, w_t = [1, 8, 0.5] has the product 4 and gives [0, 0, 0].
    """
    return _keep_inside(sum_by_sequence(log_ratio.detach(), sequence).exp(), low, high)


def geometric_mask(log_ratio: Tensor, sequence: Tensor, *, low: float = 0.99, high: float = 1.01) -> Tensor:
    """Return w = exp(mean_t log w_t) over the token's sequence if low <= w <= high, else 0.

    Unlike the product in `sequence_mask`, the geometric mean is not biased against long sequences.

    Example: in one sequence, w_t = [4, 0.25] has the geometric mean 1 and gives [1, 1].
    """
    return _keep_inside(average_by_sequence(log_ratio.detach(), sequence).exp(), low, high)


def _keep_inside(weights: Tensor, low: float, high: float) -> Tensor:
    return torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}
