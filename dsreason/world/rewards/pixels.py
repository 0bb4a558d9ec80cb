"""Built-in rewards, which need no weights: what can be measured on the pixels of a clip.

Each is `fn(clips, samples) -> [B]` on clips `[B, 3, T, H, W]`, float32 in 0..1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.world.types import WorldRow

COLOURS = ("red", "green", "blue")
"""Names in the order of the channels."""
GREY = 0.15
"""Difference between the largest and the smallest channel below which a pixel counts as grey."""
SOLID_SHARE = 45 / 1024
"""Saturated mass of a frame, as a share of its pixels, from which on `solid` is 1: half of the built-in task's square."""


def brightness(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Mean over all pixels and channels."""
    return clips.flatten(1).mean(1)


def sharpness(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Mean absolute Laplacian of the grey frames: 0 for a blank one, 4 for a chessboard of single pixels."""
    grey = clips.mean(1)  # [B, T, H, W]
    middle = grey[..., 1:-1, 1:-1]
    around = grey[..., :-2, 1:-1] + grey[..., 2:, 1:-1] + grey[..., 1:-1, :-2] + grey[..., 1:-1, 2:]
    return (around - 4 * middle).abs().flatten(1).mean(1)


def motion(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Mean absolute difference between a frame and the next; 0 for a still, or a single frame."""
    return _average(clips.mean(1).diff(dim=1).abs())


def flicker(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Mean absolute second difference of the frames' brightness: 0 if it is steady or fades evenly. Weigh it negatively."""
    return _average(clips.mean(dim=(1, 3, 4)).diff(n=2, dim=1).abs())


def colour(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """Share, 0 to 1, of the clip's colour that lies in the channel which the prompt names first (red, green or blue).

    Raises:
        DataError: a prompt names none of them.
    """
    channels = torch.tensor([_find_channel(sample) for sample in samples])
    return _compute_channel_shares(clips).gather(1, channels[:, None])[:, 0]


def red(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """`colour`, whatever the prompt says."""
    return _compute_channel_shares(clips)[:, 0]


def solid(clips: Tensor, samples: Sequence[WorldRow], share: float = SOLID_SHARE) -> Tensor:
    """Saturated mass of a frame over `share` of its pixels, at most 1: a coloured and bright object is visible."""
    saturation = clips.amax(1) - clips.amin(1)  # [B, T, H, W]
    return ((saturation - GREY).clamp(min=0).flatten(1).mean(1) / share).clamp(max=1)


def follow(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """`colour` times `solid`: clips that are nearly black could have just the right colour."""
    return colour(clips, samples) * solid(clips, samples)


def red_solid(clips: Tensor, samples: Sequence[WorldRow]) -> Tensor:
    """`red` times `solid`."""
    return red(clips, samples) * solid(clips, samples)


def _average(values: Tensor) -> Tensor:
    """Average over all but the first axis; 0 if there are no values."""
    return values.flatten(1).sum(1) / max(1, values[0].numel())


def _compute_channel_shares(clips: Tensor) -> Tensor:
    """`[B, 3]`: how much each channel exceeds both others, over all pixels, in shares of the three."""
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
