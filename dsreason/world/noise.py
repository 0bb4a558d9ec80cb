"""The noise levels of a rollout, and the noise itself.

Noise depends on what it is for, and on nothing else: not on the number of ranks, not on the cut of the batch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dsreason.world.families import find_family
from dsreason.world.schema import WorldConfig


def make_generator(*key: object) -> np.random.Generator:
    """Make a separate random generator for each key. torch's generator on a CPU uses only 32 bits of its seed; this one has
    keys of 128."""
    digest = hashlib.sha256("\n".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_noise(shape: tuple[int, ...], *, seed: int, step: int, prompt: int, clip: int, purpose: str) -> Tensor:
    """Standard normal values, float32, on the CPU.

    Args:
        step: the optimizer step (or rollout) that uses it.
        prompt: number of the prompt in the step, over all ranks.
        clip: number of the clip in its group.
        purpose: such as "start" or "sampling step 3": different ones have independent noise.
    """
    values = make_generator(seed, step, prompt, clip, purpose).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values)


def compute_linear_sigmas(steps: int, shift: float) -> Tensor:
    """Equal steps from 1 to 0, shifted by s → shift·s / (1 + (shift − 1)·s): `[steps + 1]`, float64."""
    s = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * s / (1 + (shift - 1) * s)


def compute_sigmas(config: WorldConfig, folder: Path, steps: int | None = None) -> Tensor:
    """Return the noise levels of a rollout of the model in `folder`: `[steps + 1]`, float64, falling to 0.

    Without `steps` there are `world.sampling_steps`.
    """
    steps = steps or config.world.sampling_steps
    match config.world.schedule:
        case "linear":
            return compute_linear_sigmas(steps, config.world.shift)
        case "family":
            return find_family(folder).sigmas(folder, steps)


def draw_window(size: int, steps: int, *, seed: int, step: int) -> range:
    """`size` consecutive ones of a rollout's first half of `steps`, drawn anew for each optimizer step `step`."""
    last = max(1, steps // 2) - size
    if last < 0:
        raise ValueError(f"window: {size=} is longer than the first half of {steps=}")
    first = int(make_generator(seed, step, "window").integers(last + 1))
    return range(first, first + size)
