"""Loss for supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor


def compute_sft_loss(logprobs: Tensor, *, num_tokens: int) -> Tensor:
    """Return this micro-batch's contribution to the mean negative log-likelihood of the trained tokens.

    Args:
        logprobs: `[N]` log-probabilities of this micro-batch's trained tokens.
        num_tokens: number of trained tokens in the global batch (all ranks, all micro-batches), so that the micro-batches'
            contributions add up to the mean over the global batch, however the batch is divided. If 0, the loss is 0.

    Example: log-probabilities [-1, -3] with 4 tokens in the global batch give (1 + 3) / 4 = 1.
    """
    return -logprobs.sum() / max(num_tokens, 1)
