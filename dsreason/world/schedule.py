"""The noise levels of a rollout, and which of its steps are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from dsreason.world.noise import generator


def linear(steps: int, shift: float) -> Tensor:
    """Equal steps from 1 to 0, shifted by s → shift·s / (1 + (shift − 1)·s): `[steps + 1]`, float64."""
    s = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * s / (1 + (shift - 1) * s)


def window(size: int, steps: int, *, seed: int, step: int) -> range:
    """`size` consecutive ones of a rollout's first half of `steps`, drawn anew for each optimizer step `step`."""
    last = max(1, steps // 2) - size
    if last < 0:
        raise ValueError(f"window: {size=} is longer than the first half of {steps=}")
    first = int(generator(seed, step, "window").integers(last + 1))
    return range(first, first + size)
