"""On-policy distillation: advantages computed from a teacher's log-probabilities for the tokens that the student sampled."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_distillation_advantages(
    teacher_logprobs: Tensor, student_logprobs: Tensor, sequence: Tensor, *, discount: float = 0.0
) -> Tensor:
    """Return A_t = Σ_{s ≥ t} discount^(s - t) (log T(y_s) - log π(y_s)) within each sequence, `[N]`, detached.

    π is the policy that sampled the tokens, and T is the teacher. With discount 0, the expected policy gradient with these
    advantages is the negative gradient of the KL at each individual token: E_π[(log T - log π) ∇log π] = -∇KL(π ‖ T)
    (2306.13649; thinkingmachines.ai/blog/on-policy-distillation). With a positive discount, a token also gets credit for the
    tokens that follow it.

    Args:
        teacher_logprobs: `[N]` log-probabilities under the teacher.
        student_logprobs: `[N]` log-probabilities under π.
        sequence: `[N]` int64, index of each token's sequence; the tokens of a sequence are adjacent and in order.

    Example: log T [-1.44, -0.63] and log π [-0.50, -0.21] give [-0.94, -0.42]; with discount 0.5, [-1.15, -0.42].
    """
    advantages = (teacher_logprobs - student_logprobs).detach()
    if not discount:
        return advantages
    lengths = torch.unique_consecutive(sequence, return_counts=True)[1].tolist()
    discounted = []
    for sequence_advantages in advantages.double().split(lengths):
        later = 0.0
        for value in reversed(sequence_advantages.tolist()):
            later = value + discount * later
            discounted.append(later)
        discounted[-len(sequence_advantages) :] = reversed(discounted[-len(sequence_advantages) :])
    return torch.tensor(discounted, dtype=advantages.dtype, device=advantages.device)
