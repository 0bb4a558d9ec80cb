"""Loss presets, which contain the settings of published recipes as defaults that the run's configuration may override."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsreason.losses.policy import MicroBatchLoss, cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss


@dataclass(frozen=True)
class Preset:
    """Settings of a published recipe. In all of them, the KL term is the k3 estimate, added to the loss.

    Example: `preset = PRESETS["dapo"]; preset.loss(inputs, clip_low=preset.clip_low, clip_high=preset.clip_high)`.
    """

    loss: Callable[..., MicroBatchLoss]
    advantage: str
    """Key in `ADVANTAGES` for the function that computes the advantages."""
    clip_low: float
    clip_high: float
    kl_coef: float = 0.0
    overlong_filter: bool = False
    """Whether to exclude truncated completions from training; reward statistics still include them."""
    dynamic_sampling: bool = False
    """Whether to replace groups whose rewards are all equal with newly sampled groups."""


PRESETS: dict[str, Preset] = {
    "grpo": Preset(grpo_loss, "group_normalized", 0.2, 0.2, kl_coef=0.04),
    "dr_grpo": Preset(dr_grpo_loss, "group_centered", 0.2, 0.2),
    "dapo": Preset(dapo_loss, "group_normalized", 0.2, 0.28, overlong_filter=True, dynamic_sampling=True),
    "gspo": Preset(gspo_loss, "group_normalized", 3e-4, 4e-4),
    "cispo": Preset(cispo_loss, "group_normalized", float("inf"), 4.0, dynamic_sampling=True),
}
