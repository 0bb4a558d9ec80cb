"""Balance of a mixture of experts: the routers' auxiliary loss, and the load of each expert.

Source: Switch Transformers (2101.03961), equations 4 to 6, for tokens that are routed to k experts instead of one, as in
transformers' `load_balancing_loss_func`. transformers averages over the tokens of all layers together, which lets an expert's
overload in one layer hide the overload of another expert in another layer; here, each layer has its own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Routing statistics for one forward pass."""

    balance_loss: Tensor
    """Mean balance loss over the layers, a scalar: k if all experts are equally loaded, and at most the number of experts."""
    loads: Tensor
    """Number of tokens that each layer sends to each expert, detached, `[layers, experts]`."""


def compute_routing(
    logits: Sequence[Tensor], counted: Tensor, num_tokens: Tensor, top_k: int, *, group: Any = None
) -> Routing:
    """Compute the balance loss, per layer `experts · Σ_i f_i · P_i`, and the loads.

    f_i is the number of tokens that are sent to expert i, divided by the number of tokens, and P_i is the mean probability of
    expert i. Gradients flow only through P.

    Args:
        logits: each layer's router logits `[tokens, experts]`.
        counted: `[tokens]` bool, which is False for padding.
        num_tokens: number of counted tokens in the row, on all ranks of the group.
        top_k: number of experts to which each token is sent.
        group: ranks that compute the row together, each with a part of the tokens; None for a single rank. Every rank returns the
            values of the entire row, but gradients flow only to its own tokens.

    Example: two experts, top_k 1, and tokens with probabilities [0.9, 0.1] and [0.8, 0.2] give 2 · (1 · 0.85 + 0 · 0.15) = 1.7.
    """
    probs = [layer.float().softmax(-1) for layer in logits]
    loads = torch.stack([count_loads(layer.detach(), counted, top_k) for layer in probs])
    mean_probs = torch.stack([(layer * counted[:, None]).sum(0) for layer in probs]) / num_tokens
    if group is not None:
        dist.all_reduce(loads, group=group)
        total = mean_probs.detach().clone()
        dist.all_reduce(total, group=group)
        mean_probs = mean_probs + (total - mean_probs.detach())
    losses = loads.shape[1] * (loads / num_tokens * mean_probs).sum(1)
    return Routing(losses.mean(), loads)


def count_loads(probs: Tensor, counted: Tensor, top_k: int) -> Tensor:
    """Count the tokens sent to each expert: probabilities `[tokens, experts]` → `[experts]` float32."""
    experts = probs.topk(top_k, dim=-1).indices
    weights = counted.float()[:, None].expand_as(experts)
    return probs.new_zeros(probs.shape[1]).scatter_add_(0, experts.flatten(), weights.flatten())


def compute_max_load(loads: Tensor) -> float:
    """Return the largest load of any expert in any layer, relative to the mean load in that layer.

    Args:
        loads: `[layers, experts]`.

    Returns:
        1 if all experts in each layer have the same load; experts / k if some layer sends all tokens to the same k experts.
    """
    return float((loads.amax(1) / loads.mean(1)).max())
