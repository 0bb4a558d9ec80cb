"""Measures of how clips look, which reveal reward hacking before the rewards do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GRID = (4, 8, 8)
"""Number of frames, rows and columns that clips are reduced to before they are compared with each other."""


@dataclass(frozen=True)
class Look:
    """Measures of how a clip looks."""

    brightness: float
    """Mean of all pixels, 0 to 1."""
    motion: float
    """Mean absolute change of a pixel from frame to frame, 0 to 1."""
    small: NDArray[np.float32]
    """Clip reduced to `GRID`: `[3, 4, 8, 8]`, 0 to 1."""

    @property
    def facts(self) -> dict[str, float]:
        return {"brightness": self.brightness, "motion": self.motion}


def look_at(clips: Tensor) -> list[Look]:
    """Measure how each clip looks; `clips` is uint8 `[B, 3, T, H, W]`, on any device."""
    looks = []
    for clip in clips:
        values = clip.float() / 255
        small = torch.nn.functional.adaptive_avg_pool3d(values, GRID).cpu().numpy()
        motion = float(values.diff(dim=1).abs().mean()) if values.shape[1] > 1 else 0.0
        looks.append(Look(float(values.mean()), motion, small))
    return looks


def average_looks(groups: Sequence[Sequence[Look]], prefix: str) -> dict[str, float]:
    """Return the mean `brightness` and `motion` of all clips, and the mean `diversity` within the groups.

    A group's diversity is the standard deviation of its reduced clips; the metric is omitted if no group has several clips.
    """
    every = [look for group in groups for look in group]
    metrics = {
        f"{prefix}/brightness": float(np.mean([look.brightness for look in every])),
        f"{prefix}/motion": float(np.mean([look.motion for look in every])),
    }
    spreads = [np.std([look.small for look in group], axis=0).mean() for group in groups if len(group) > 1]
    if spreads:
        metrics[f"{prefix}/diversity"] = float(np.mean(spreads))
    return metrics
