"""The media of a batch as one sequence for the vision tower, and the placeholder tokens that show their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsreason.data.collate import GRIDS, PIXELS
from dsreason.data.types import TOKEN_TYPES, Batch


@dataclass(frozen=True)
class MediaTokens:
    """Distinct media in the order in which the tower encodes them: all images, then all videos.

    Example: two images of 4 tokens, shown as first, second, first, then one video of 8 tokens:
    `grids` `[3, 3]`, `numbers=(0, 1, 0, 2)`, `indices` `[20]`, of which the last 8 are the video's.
    """

    grids: Tensor  # [distinct media, 3] int64, in patches: frames, height, width
    numbers: tuple[int, ...]
    """For each medium that the rows show, its number among the distinct ones."""
    indices: Tensor  # [tokens] int64: placeholders in the flattened rows, in the order of `numbers`

    @property
    def patches_per_token(self) -> int:
        shown = sum(self.grids[number].prod().item() for number in self.numbers)
        return int(shown) // len(self.indices)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each distinct medium."""
        patches = self.patches_per_token
        return [size // patches for size in self.grids.prod(-1).tolist()]

    def spread(self, features: Tensor) -> Tensor:
        """Repeat the features of media that the rows show more than once: `[distinct tokens, D]` → `[tokens, D]`."""
        if len(self.numbers) == len(self.grids):
            return features
        parts = features.split(self.lengths)
        return torch.cat([parts[number] for number in self.numbers])


def find_media_tokens(batch: Batch) -> MediaTokens | None:
    """Read the layout of a batch's media, whose grids and token types are on the host. None if it shows no media."""
    grids: list[Tensor] = []
    numbers: list[int] = []
    indices: list[Tensor] = []
    for kind, key in GRIDS.items():
        if key not in batch.mm_kwargs:
            continue
        shown: Sequence[int] = batch.media_numbers.get(kind) or range(len(batch.mm_kwargs[key]))
        offset = sum(map(len, grids))
        grids.append(batch.mm_kwargs[key][[shown.index(number) for number in range(max(shown) + 1)]])
        numbers += [offset + number for number in shown]
        indices.append((batch.mm_token_type_ids.flatten() == TOKEN_TYPES[kind]).nonzero().flatten())
    return MediaTokens(torch.cat(grids), tuple(numbers), torch.cat(indices)) if grids else None


def join_pixels(batch: Batch) -> Tensor:
    """Concatenate the pixels `[patches, dim]` of all distinct media, in the order of `MediaTokens.grids`."""
    pixels = [batch.mm_kwargs[key] for key in PIXELS.values() if key in batch.mm_kwargs]
    return pixels[0] if len(pixels) == 1 else torch.cat(pixels)
