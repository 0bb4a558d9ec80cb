"""Supervised fine-tuning loss."""

from __future__ import annotations

from torch import Tensor


def sft_loss(logprobs: Tensor, *, num_tokens: int) -> Tensor:
    """Mean negative log-likelihood of the trained tokens.

    Args:
        logprobs: `[N]` log-probabilities of this micro-batch's trained tokens.
        num_tokens: trained tokens of the whole global batch (all ranks, all micro-batches), so that the sum of this
            over every micro-batch of every rank is the mean over the global batch, however it was cut.

    Example: log-probabilities [-1, -3] of 4 tokens in all give (1 + 3) / 4 = 1.
    """
    return -logprobs.sum() / num_tokens
