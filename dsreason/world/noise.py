"""The noise and the noise levels for a rollout.

Noise depends only on the clip and on its purpose, not on the number of ranks or the split into micro-batches.
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
    """Create a random generator for a key; generators for different keys are independent.

    The key is hashed to 128 bits, whereas torch's CPU generator uses only 32 bits of its seed.
    """
    digest = hashlib.sha256("\n".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_noise(shape: tuple[int, ...], *, seed: int, step: int, prompt: int, clip: int, purpose: str) -> Tensor:
    """Draw standard normal values: float32, on the CPU.

    Args:
        step: optimizer step (or rollout) that uses the noise.
        prompt: index of the prompt within the step, counted across all ranks.
        clip: index of the clip within its group.
        purpose: use of the noise, such as "start" or "sampling step 3"; each purpose has independent noise.
    """
    values = make_generator(seed, step, prompt, clip, purpose).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values)


def compute_linear_sigmas(steps: int, shift: float) -> Tensor:
    """Return equally spaced levels from 1 to 0, shifted by s → shift·s / (1 + (shift − 1)·s): `[steps + 1]`, float64."""
    s = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * s / (1 + (shift - 1) * s)


def compute_sigmas(config: WorldConfig, folder: Path, steps: int | None = None) -> Tensor:
    """Return the noise levels for a rollout with the model in `folder`: `[steps + 1]`, float64, decreasing to 0.

    `steps` defaults to `world.sampling_steps`.
    """
    steps = steps or config.world.sampling_steps
    match config.world.schedule:
        case "linear":
            return compute_linear_sigmas(steps, config.world.shift)
        case "family":
            return find_family(folder).sigmas(folder, steps)


def draw_window(size: int, steps: int, *, seed: int, step: int) -> range:
    """Draw `size` consecutive sampling steps from the first half of a rollout's `steps`; `step` is the optimizer step."""
    last = max(1, steps // 2) - size
    if last < 0:
        raise ValueError(f"draw_window: the window must fit into the first half of the steps; got {size=} and {steps=}")
    first = int(make_generator(seed, step, "window").integers(last + 1))
    return range(first, first + size)
