"""The clips of a step: their assignment to ranks and micro-batches, their noise and their given frames."""

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
    """The index of a clip in a step: `ClipIndex(prompt=3, clip=0)` is the first clip of the fourth prompt across all ranks."""

    prompt: int
    clip: int


@dataclass(frozen=True)
class ClipShare:
    """A rank's share of the clips: share `index` of `count`. All ranks in a context-parallel group have the same share."""

    index: int
    count: int
    leads: bool = True
    """Whether the rank represents its group; only such ranks request rewards and contribute to sums over ranks."""


@dataclass(frozen=True)
class ClipMicroBatch:
    """Clips that share a forward pass, in sampling and training. All tensors are on the CPU unless `to` moves them."""

    places: tuple[ClipIndex, ...]
    counted: bool
    """Whether the clips count towards the loss; false for a stand-in, which only keeps the ranks in step."""
    rows: tuple[WorldRow, ...]
    start: Tensor
    """Initial noise for sampling: `[B, C, T, h, w]`."""
    text: Tensor
    """Embeddings of the prompts: `[B, L, D]`."""
    conditioning: Conditioning | None = None
    clean: Tensor | None = None
    """Latents of the rows' real clips, `[B, C, T, h, w]`; None if training does not need them."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def free(self) -> Tensor | None:
        """Mask of the sampled frames: `[B, 1, T, 1, 1]`, 1 for sampled frames, 0 for given frames; None if no frame is given."""
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
    """A sampled micro-batch with the values that training needs. All tensors are on the CPU."""

    batch: ClipMicroBatch
    latents: Tensor
    """Latents of the sampled clips: `[B, C, T, h, w]`, float32."""
    trajectory: Mapping[int, Kept]
    """Recorded steps by step number; empty for nft."""
    advantages: Tensor
    """Advantages of the clips: `[B]`, float32; zero until the rewards arrive."""
    fixed: Mapping[str, Mapping[int, Tensor]]
    """Velocities of the policies "reference" and "old", `[B, C, T, h, w]`, keyed by policy, then by step number or, for nft, by
    the index of the sampled noise level. They are bfloat16 if that is lossless; see `to_lossless_bfloat16`."""


def to_lossless_bfloat16(tensor: Tensor) -> Tensor:
    """Convert a tensor to bfloat16 if that is lossless, as it is for a velocity returned by a bfloat16 transformer."""
    half = tensor.bfloat16()
    return half if torch.equal(half.to(tensor), tensor) else tensor


def group_local_clips(
    places: Sequence[ClipIndex], share: ClipShare, size: int
) -> list[tuple[tuple[ClipIndex, ...], bool]]:
    """Split this rank's clips into groups of at most `size`; return each group and whether it counts.

    Every rank has the same number of groups. Example: 5 clips on 2 ranks in groups of 2 → 2 + 1 clips and 2 clips + a stand-in.
    """
    own_clips = [places[place.prompt] for place in list_local_places(len(places), share)]
    num_groups = ceil(ceil(len(places) / share.count) / size)
    groups = [tuple(own_clips[i * size : (i + 1) * size]) for i in range(num_groups)]
    return [(group, True) if group else ((places[0],), False) for group in groups]


def list_local_places(count: int, share: ClipShare) -> list[ClipIndex]:
    """Return the indices of this rank's share of `count` clips, each of which has its own prompt."""
    begin, end = (i * count // share.count for i in (share.index, share.index + 1))
    return [ClipIndex(number, 0) for number in range(begin, end)]


def draw_start_noise(places: Sequence[ClipIndex], shape: Sequence[int], config: WorldConfig, step: int) -> Tensor:
    """Draw the initial noise for sampling, `[B, C, T, h, w]`; with `world.same_noise`, all clips in a group share it."""
    clips = [ClipIndex(place.prompt, 0) for place in places] if config.world.same_noise else places
    return draw_clip_noise(clips, shape, config.train.seed, step, "start")


def draw_clip_noise(places: Sequence[ClipIndex], shape: Sequence[int], seed: int, step: int, purpose: str) -> Tensor:
    """Draw each clip's noise, `[B, C, T, h, w]`; it does not depend on the number of ranks."""
    drawn = [
        draw_noise(tuple(shape), seed=seed, step=step, prompt=place.prompt, clip=place.clip, purpose=purpose)
        for place in places
    ]
    return torch.stack(drawn)


def draw_num_given_frames(config: WorldConfig, step: int, prompt: int) -> int:
    """Draw the number of latent frames that are given from a row's clip; it is the same for all clips in a group."""
    low, high = config.world.conditional_frames
    return int(make_generator(config.train.seed, step, prompt, "given frames").integers(low, high + 1))


def build_conditioning(
    places: Sequence[ClipIndex], clean_of: Callable[[ClipIndex], Tensor], config: WorldConfig, step: int
) -> Conditioning | None:
    """Build the given frames for the clips at `places`; return None if the run has no given frames.

    Args:
        clean_of: function from a clip's index to the latents `[C, T, h, w]` of its row's real clip.
    """
    if config.world.conditional_frames[1] == 0:
        return None
    clean = torch.stack([clean_of(place) for place in places])
    mask = torch.zeros(len(places), 1, clean.shape[2], 1, 1)
    for row, place in enumerate(places):
        mask[row, :, : draw_num_given_frames(config, step, place.prompt)] = 1
    return Conditioning(clean * mask, mask)
