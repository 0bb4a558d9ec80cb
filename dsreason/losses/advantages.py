"""Functions that compute advantages from group rewards.

Notation: rewards are `[P, G]` for P prompts with G completions each; a row is a group. If all rewards in a group are equal, its
advantages are exactly 0, even if rounding makes the mean differ from the rewards, as happens with several rewards of 0.1.

NaN stands for a missing reward. Means, sums and standard deviations ignore it, and the completion's advantage is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6


def group_normalized(rewards: Tensor) -> Tensor:
    """Return (R - group mean) / (population std of the group + 1e-6), `[P, G]` → `[P, G]` (GRPO, 2402.03300).

    Example: [1, 0, 0, 0] has mean 0.25 and std 0.4330, and gives [1.7320, -0.5773, -0.5773, -0.5773].
    """
    centered = group_centered(rewards)
    std = (rewards - rewards.nanmean(dim=1, keepdim=True)).square().nanmean(dim=1, keepdim=True).sqrt()
    return (centered / (std + EPS)).nan_to_num(nan=0.0)


def group_centered(rewards: Tensor) -> Tensor:
    """Return R - group mean, `[P, G]` → `[P, G]` (Dr.GRPO, 2503.20783).

    The difference is not divided by the std, because that would favour prompts that are too easy or too hard.

    Example: [1, 0, 0, 0] gives [0.75, -0.25, -0.25, -0.25].
    """
    return _clear_equal_groups(rewards - rewards.nanmean(dim=1, keepdim=True), rewards)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return R - mean of the other rewards in the group, `[P, G]` → `[P, G]` (RLOO, 2402.14740).

    Example: [1, 0, 0, 0] gives [1, -1/3, -1/3, -1/3]. A group of one completion gives 0.
    """
    sum_of_others = rewards.nansum(dim=1, keepdim=True) - rewards
    num_others = (rewards.isfinite().sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return _clear_equal_groups(rewards - sum_of_others / num_others, rewards)


def batch_normalized(rewards: Tensor) -> Tensor:
    """Return (R - group mean) / (population std of all rewards + 1e-6), `[P, G]` → `[P, G]` (Lite PPO, 2508.08221).

    `rewards` must contain all groups of the global batch, not only one rank's, because the std is computed over all groups.

    Example: [[1, 0], [1, 1]] has std 0.4330 over all four rewards, and gives [[1.1547, -1.1547], [0, 0]].
    """
    std = (rewards - rewards.nanmean()).square().nanmean().sqrt()
    return (group_centered(rewards) / (std + EPS)).nan_to_num(nan=0.0)


def _clear_equal_groups(advantages: Tensor, rewards: Tensor) -> Tensor:
    missing = rewards.isnan()
    largest = rewards.masked_fill(missing, -torch.inf).amax(dim=1, keepdim=True)
    smallest = rewards.masked_fill(missing, torch.inf).amin(dim=1, keepdim=True)
    return torch.where((largest <= smallest) | missing, torch.zeros_like(advantages), advantages)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "group_normalized": group_normalized,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
    "batch_normalized": batch_normalized,
}
