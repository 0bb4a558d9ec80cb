"""The clips of a step: which of them a rank computes, what each depends on, and how they are batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from dsreason.world.noise import draw_noise, make_generator
from dsreason.world.sampler import Kept
from dsreason.world.schema import WorldConfig
from dsreason.world.types import Conditioning, WorldRow


@dataclass(frozen=True, order=True)
class ClipIndex:
    """One clip of a step: `ClipIndex(prompt=3, clip=0)` is the first of the fourth prompt, counted over all ranks."""

    prompt: int
    clip: int


@dataclass(frozen=True)
class ClipShare:
    """A rank's share of the clips. The ranks of one context-parallel group have the same."""

    index: int
    count: int
    leads: bool = True
    """True for the rank that speaks for its group: it requests rewards, and counts in sums."""


@dataclass(frozen=True)
class ClipMicroBatch:
    """Clips that go through one forward, in sampling and in training alike. All tensors are on the CPU."""

    places: tuple[ClipIndex, ...]
    counted: bool
    """False for a stand-in, which only keeps the ranks in step."""
    rows: tuple[WorldRow, ...]
    start: Tensor
    """`[B, C, T, h, w]`: the noise that sampling begins with."""
    text: Tensor
    """`[B, L, D]`."""
    conditioning: Conditioning | None = None
    clean: Tensor | None = None
    """`[B, C, T, h, w]`: latents of the rows' own clips, if training needs them."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def free(self) -> Tensor | None:
        """`[B, 1, T, 1, 1]`: 1 for sampled frames; None if no frame is given."""
        return None if self.conditioning is None else 1 - self.conditioning.mask

    def to(self, device: torch.device) -> ClipMicroBatch:
        def moved(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device)

        conditioning = self.conditioning
        return replace(
            self,
            start=moved(self.start),
            text=moved(self.text),
            conditioning=None
            if conditioning is None
            else Conditioning(moved(conditioning.latents), moved(conditioning.mask)),
            clean=moved(self.clean),
        )


@dataclass(frozen=True)
class SampledClips:
    """A sampled micro-batch with what its training needs. All tensors are on the CPU."""

    batch: ClipMicroBatch
    latents: Tensor
    """`[B, C, T, h, w]`, float32."""
    trajectory: Mapping[int, Kept]
    """The trained steps by number; empty for nft."""
    advantages: Tensor
    """`[B]`, float32; zero until the rewards have arrived."""
    fixed: Mapping[str, Mapping[int, Tensor]]
    """Velocities of other policies, `[B, C, T, h, w]`: "reference" and "old", by number of the trained step or time. In
    bfloat16 where that loses nothing, see `halve`."""


def halve(tensor: Tensor) -> Tensor:
    """Convert to bfloat16 if that keeps every value, as for a velocity that comes straight out of a transformer in bfloat16."""
    half = tensor.bfloat16()
    return half if torch.equal(half.to(tensor), tensor) else tensor


def share_out(places: Sequence[ClipIndex], share: ClipShare, size: int) -> list[tuple[tuple[ClipIndex, ...], bool]]:
    """Group this rank's clips by at most `size`, with whether they count; every rank has the same number of groups.

    Example: 5 clips over 2 ranks in groups of 2 → [2, 1] and [2, stand-in] clips.
    """
    own_clips = [places[place.prompt] for place in own_places(len(places), share)]
    num_groups = ceil(ceil(len(places) / share.count) / size)
    groups = [tuple(own_clips[i * size : (i + 1) * size]) for i in range(num_groups)]
    return [(group, True) if group else ((places[0],), False) for group in groups]


def own_places(count: int, share: ClipShare) -> list[ClipIndex]:
    """This rank's share of `count` prompts of one clip each."""
    begin, end = (i * count // share.count for i in (share.index, share.index + 1))
    return [ClipIndex(number, 0) for number in range(begin, end)]


def start_noise(places: Sequence[ClipIndex], shape: Sequence[int], config: WorldConfig, step: int) -> Tensor:
    """`[B, C, T, h, w]`: what sampling begins with; with `world.same_noise` one for the whole group."""
    clips = [ClipIndex(place.prompt, 0) for place in places] if config.world.same_noise else places
    return clip_noise(clips, shape, config.train.seed, step, "start")


def clip_noise(places: Sequence[ClipIndex], shape: Sequence[int], seed: int, step: int, purpose: str) -> Tensor:
    """`[B, C, T, h, w]`, each clip's own: the same on any number of ranks."""
    drawn = [
        draw_noise(tuple(shape), seed=seed, step=step, prompt=place.prompt, clip=place.clip, purpose=purpose)
        for place in places
    ]
    return torch.stack(drawn)


def draw_given_frames(config: WorldConfig, step: int, prompt: int) -> int:
    """Latent frames of the row's clip that are given, drawn once for a group."""
    low, high = config.world.conditional_frames
    return int(make_generator(config.train.seed, step, prompt, "given frames").integers(low, high + 1))


def build_conditioning(
    places: Sequence[ClipIndex], clean_of: Callable[[ClipIndex], Tensor], config: WorldConfig, step: int
) -> Conditioning | None:
    """Return what is given of the clips at these places; None if no clip of the run has given frames.

    Args:
        clean_of: latents `[C, T, h, w]` of the clip of a place's row.
    """
    if config.world.conditional_frames[1] == 0:
        return None
    clean = torch.stack([clean_of(place) for place in places])
    mask = torch.zeros(len(places), 1, clean.shape[2], 1, 1)
    for row, place in enumerate(places):
        mask[row, :, : draw_given_frames(config, step, place.prompt)] = 1
    return Conditioning(clean * mask, mask)
