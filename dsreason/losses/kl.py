"""Estimators of KL(policy ‖ reference) at the sampled tokens, computed elementwise from `[N]` log-probabilities.

Notation: d = ref_logprobs - logprobs, with tokens sampled from the policy (http://joschu.net/blog/kl-approx.html).
Gradients flow through `logprobs`. In a loss, only the gradient of a term matters, not its value. In expectation, only the
gradients of k2 and of the bias-corrected k3 equal the gradient of the KL; the expected gradient of k1 is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# e^20 is far above any clamp but finite: an infinite value would turn the clamped gradient into 0 * inf = nan.
MAX_LOG_RATIO = 20.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return -d, `[N]`: unbiased, but with high variance and often negative.

    Use this estimator only for logging: it has no effect as a loss term, because its expected gradient is zero.

    Example: logprobs -1 and ref_logprobs -1.5 give 0.5.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d² / 2, `[N]`: a biased estimate whose expected gradient equals the gradient of the KL.

    Example: logprobs -1 and ref_logprobs -1.5 give 0.125.
    """
    return (ref_logprobs - logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, *, clamp: float | None = None) -> Tensor:
    """Return e^d - d - 1, `[N]`: unbiased and never negative. GRPO uses this estimator (2402.03300).

    Args:
        clamp: maximum value per token (10 in cosmos-rl); None disables clamping. A token above the maximum has no gradient,
            so precisely the tokens that have drifted furthest are not pulled back.

    Example: logprobs -1 and ref_logprobs -0.5 give e^0.5 - 0.5 - 1 = 0.1487.
    """
    d = ref_logprobs - logprobs
    if clamp is not None:
        d = d.clamp(max=MAX_LOG_RATIO)
    value = torch.expm1(d) - d  # exp(d) - 1 would lose all precision for small d
    return value if clamp is None else value.clamp(max=clamp)


def bias_corrected_k3(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, *, clamp: float | None = None
) -> Tensor:
    """Return e^(logprobs - old_logprobs) (e^d - d - 1), `[N]`: k3 times the importance ratio (DeepSeek-V3.2, 2512.02556).

    The ratio is not detached. The gradient of the product is ratio (k3 + 1 - e^d) = -d ratio; in expectation, it equals the
    gradient of the KL, even for tokens sampled from an older policy.

    Example: logprobs -1, ref_logprobs -0.5 and old_logprobs -1.1 give e^0.1 * 0.1487 = 0.1644.
    """
    return torch.exp(logprobs - old_logprobs) * k3(logprobs, ref_logprobs, clamp=clamp)


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
