"""Preference losses for pairs of a better and a worse answer to a prompt. Each variant is a function that returns losses `[P]`.

Notation: P is the number of pairs, c is the chosen answer, r the rejected answer, π the policy, ρ the reference and σ the
logistic function. The log-ratio of an answer is log π - log ρ, and h = β (log-ratio of c - log-ratio of r) is the margin.
Without a reference, log ρ is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities for P pairs of answers, summed over the trained tokens, `[P]` float64, and the answers' lengths.

    Example with a chosen answer of 4 tokens and a rejected answer of 3 tokens: `Pairs(chosen=[-10.0], rejected=[-11.0],
    ref_chosen=[-10.5], ref_rejected=[-10.8], chosen_length=[4], rejected_length=[3])`.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """Log-ratio of the chosen answer minus log-ratio of the rejected answer, h / β."""
        return self.chosen_ratio - self.rejected_ratio


@dataclass(frozen=True)
class PairSettings:
    """Settings for the preference losses."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    """Assumed fraction of pairs in which the chosen answer is actually the worse one."""
    baseline: float = 0.0
    """Reward (β · log-ratio) that BCO considers neutral; δ in the formula."""


def build_pairs(logprobs: Tensor, lengths: Tensor, ref: Tensor) -> Pairs:
    """Sum a flat micro-batch's token log-probabilities per answer, and group the answers into pairs.

    Args:
        logprobs: `[N]` log-probabilities of the trained tokens, with gradient; in each pair, the chosen answer comes first.
        lengths: `[P, 2]` int64, number of trained tokens in the chosen and in the rejected answer.
        ref: `[P, 2]` float64, log-probabilities of the chosen and the rejected answer under the reference.

    Example: logprobs [-1, -2, -4] with lengths [[2, 1]] → chosen [-3], rejected [-4].
    """
    answer = torch.arange(lengths.numel(), device=logprobs.device).repeat_interleave(lengths.flatten())
    # The sums are float64, because a margin is a small difference between large sums.
    sums = logprobs.new_zeros(lengths.numel(), dtype=torch.float64).index_add(0, answer, logprobs.double())
    chosen_sums, rejected_sums = sums.view(-1, 2).unbind(1)
    return Pairs(chosen_sums, rejected_sums, ref[:, 0], ref[:, 1], lengths[:, 0], lengths[:, 1])


def sigmoid_loss(pairs: Pairs, settings: PairSettings) -> Tensor:
    """Compute the DPO loss (2305.18290): -log σ(h) or, with label smoothing ε (cDPO), -(1 - ε) log σ(h) - ε log σ(-h).

    Example: h = 0.07 gives 0.6588.
    """
    h, smoothing = settings.beta * pairs.margin, settings.label_smoothing
    return -(1 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)


def robust_loss(pairs: Pairs, settings: PairSettings) -> Tensor:
    """Compute the robust DPO loss (2403.00409): (-(1 - ε) log σ(h) + ε log σ(-h)) / (1 - 2ε).

    Its expectation over flipped labels equals the DPO loss.

    Example: h = 0.07 with ε = 0.1 gives (0.9 · 0.6588 - 0.1 · 0.7288) / 0.8 = 0.6500.
    """
    h, smoothing = settings.beta * pairs.margin, settings.label_smoothing
    return (-(1 - smoothing) * logsigmoid(h) + smoothing * logsigmoid(-h)) / (1 - 2 * smoothing)


def hinge_loss(pairs: Pairs, settings: PairSettings) -> Tensor:
    """Compute the SLiC loss (2305.10425), applied to log-ratios as in RSO (2309.06657): max(0, 1 - h).

    Example: h = 0.07 gives 0.93.
    """
    return torch.relu(1 - settings.beta * pairs.margin)


def ipo_loss(pairs: Pairs, settings: PairSettings) -> Tensor:
    """Compute the IPO loss (2310.12036): (d - 1 / 2β)², where d is the difference of per-token log-ratios, as in TRL.

    Example: log-ratios 0.5 over 4 tokens and -0.2 over 2 give d = 0.125 + 0.1; with β = 0.1, (0.225 - 5)² = 22.8006.
    """
    d = pairs.chosen_ratio / pairs.chosen_length - pairs.rejected_ratio / pairs.rejected_length
    return (d - 1 / (2 * settings.beta)).square()


def bco_loss(pairs: Pairs, settings: PairSettings) -> Tensor:
    """Compute the BCO loss (2404.04656): -log σ(reward of c - δ) - log σ(δ - reward of r).

    An answer's reward is β · log-ratio, and δ is the baseline.

    Example: rewards 0.05 and -0.02 with δ = 0.01 give -log σ(0.04) - log σ(0.03) = 1.3516.
    """
    chosen_reward, rejected_reward = settings.beta * pairs.chosen_ratio, settings.beta * pairs.rejected_ratio
    return -logsigmoid(chosen_reward - settings.baseline) - logsigmoid(settings.baseline - rejected_reward)


def compute_chosen_nll(pairs: Pairs) -> Tensor:
    """Return the mean negative log-likelihood of the chosen answer's tokens, the SFT term of MPO (2411.10442)."""
    return -pairs.chosen / pairs.chosen_length


LOSSES: dict[str, Callable[[Pairs, PairSettings], Tensor]] = {
    "sigmoid": sigmoid_loss,
    "hinge": hinge_loss,
    "ipo": ipo_loss,
    "robust": robust_loss,
    "bco": bco_loss,
}


def compute_preference_loss(
    pairs: Pairs, settings: PairSettings, weights: Mapping[str, float], sft_weight: float, *, num_pairs: int
) -> Tensor:
    """Return this micro-batch's contribution to the weighted mean loss over the global batch.

    Args:
        weights: loss name in `LOSSES` → weight.
        sft_weight: weight of `compute_chosen_nll`.
        num_pairs: number of pairs in the global batch (all ranks, all micro-batches), so that the micro-batches'
            contributions add up to the mean over the global batch, however the batch is divided.
    """
    # Without pairs, the loss is 0 but still part of the autograd graph, because every rank must run the backward pass.
    total = sft_weight * compute_chosen_nll(pairs)
    for name, weight in weights.items():
        total = total + weight * LOSSES[name](pairs, settings)
    return total.sum() / num_pairs
