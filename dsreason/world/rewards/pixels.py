"""Built-in rewards, which are computed from a clip's pixels and need no model.

Each is a function `fn(clips, samples) -> [B]`, where the clips are `[B, 3, T, H, W]`, float32 in [0, 1].
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.world.types import WorldRow

COLOURS = ("red", "green", "blue")
"""Colour names in the order of the channels."""
GREY = 0.15
"""A pixel counts as grey if its largest and its smallest channel differ by less than this."""
SOLID_SHARE = 45 / 1024
"""Mean saturation per pixel (above `GREY`) at which `solid` reaches 1: half the value of a square in the built-in task."""


def brightness(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return each clip's mean over all pixels and channels."""
    return clips.flatten(1).mean(1)


def sharpness(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return the mean absolute Laplacian of the grey frames: 0 for a blank frame, 4 for a checkerboard of single pixels."""
    grey = clips.mean(1)  # [B, T, H, W]
    middle = grey[..., 1:-1, 1:-1]
    around = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1] + grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    return (around - 4 * middle).abs().flatten(1).mean(1)


def motion(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return the mean absolute difference between consecutive frames; 0 for a still clip or a single frame."""
    return _average(clips.mean(1).diff(dim=1).abs())


def flicker(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return the mean absolute second difference of the frames' brightness: 0 if it is constant or changes linearly.

    Use a negative weight to penalize flicker.
    """
    return _average(clips.mean(dim=(1, 3, 4)).diff(n=2, dim=1).abs())


def colour(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return how much of the clip's colour is the first colour named in the prompt (red, green or blue): a share, 0 to 1.

    Raises:
        DataError: a prompt names none of the three colours.
    """
    channels = torch.tensor([_find_channel(sample) for sample in samples])
    return _compute_channel_shares(clips).gather(1, channels[:, None])[:, 0]


def red(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return red's share of the clip's colour, regardless of the prompt; see `colour`."""
    return _compute_channel_shares(clips)[:, 0]


def solid(clips: Tensor, samples: Sequence[WorldRow], share: float = SOLID_SHARE) -> Tensor:
    """Return the clip's mean saturation (above `GREY`) divided by `share`, at most 1.

    The reward is high if a bright, coloured object is visible.
    """
    saturation = clips.amax(1) - clips.amin(1)  # [B, T, H, W]
    return ((saturation - GREY).clamp(min=0).flatten(1).mean(1) / share).clamp(max=1)


def follow(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return `colour` times `solid`, since nearly black clips can also have the right colour."""
    return colour(clips, samples) * solid(clips, samples)


def red_solid(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Return `red` times `solid`."""
    return red(clips, samples) * solid(clips, samples)


def _average(values: Tensor) -> Tensor:
    """Average over all axes but the first; return 0 if there are no values."""
    return values.flatten(1).sum(1) / max(1, values[0].numel())


def _compute_channel_shares(clips: Tensor) -> Tensor:
    """Return how much each channel exceeds the other two, summed over all pixels and normalised to a sum of 1: `[B, 3]`."""
    highest = clips.topk(2, dim=1).values
    excess = (clips - highest[:, 1:]).clamp(min=0).flatten(2).sum(2)  # only the largest channel exceeds the second
    return excess / excess.sum(1, keepdim=True).clamp(min=1e-6)


def _find_channel(sample: WorldRow) -> int:
    match = re.search(rf"\b({'|'.join(COLOURS)})\b", sample.prompt, re.IGNORECASE)
    if match is None:
        raise DataError(
            f'{sample.id}: its prompt "{sample.prompt:.80}" names no colour; the reward needs red, green or blue'
        )
    return COLOURS.index(match[0].lower())
