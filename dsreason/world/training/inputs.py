"""Inputs of a clip beside its noise: the embedding of its prompt, and the latents of its row's own clip."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from dsreason.data.loader import run_in_workers
from dsreason.data.order import StepOrder, pick_evenly
from dsreason.errors import DataError
from dsreason.files.cache import get_cache_dir
from dsreason.job import hosts
from dsreason.job.ranks import World, share_errors, wait_for_ranks
from dsreason.train.common.preflight import DTYPES
from dsreason.world.cache import LatentCache, TextCache
from dsreason.world.data import WorldDataset
from dsreason.world.families import find_family
from dsreason.world.latents import LatentCodec
from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import (
    ClipIndex,
    ClipMicroBatch,
    ClipShare,
    build_conditioning,
    clip_noise,
    own_places,
    start_noise,
)
from dsreason.world.training.preflight import clip_size, is_projection_kept
from dsreason.world.types import ClipSize, WorldRow

log = logging.getLogger(__name__)

Clip = Tensor | DataError

MOST_LOSSES = 64
"""Held-out clips whose loss a validation measures."""


@dataclass(frozen=True)
class Inputs:
    """Reads, from the cache, what micro-batches are made of."""

    config: WorldConfig
    texts: TextCache
    latents: LatentCache
    size: ClipSize
    shape: tuple[int, int, int, int]
    """Shape of a clip's latents."""

    def negative(self, count: int) -> Tensor:
        """`[count, L, D]`: what guidance leads away from."""
        return self._negative.expand(count, -1, -1)

    @cached_property
    def _negative(self) -> Tensor:
        return self.texts.read([self.config.data.negative_prompt])

    def clean(self, dataset: WorldDataset, rows: Iterable[int]) -> dict[int, Tensor]:
        """Latents `[C, T, h, w]` of the clips of these rows, each read once, by worker processes. DataError names a row whose
        clip cannot be used."""
        numbers = list(dict.fromkeys(rows))
        workers = min(self.config.data.workers, len(numbers))
        tasks = ([number] for number in numbers)
        latents = {}
        for number, (clip,) in zip(
            numbers, run_in_workers(partial(read_clips, dataset, self.size), tasks, workers=workers), strict=True
        ):
            if isinstance(clip, DataError):
                raise clip
            latents[number] = self.latents.encode(clip[None])[0]
        return latents

    def micro_batches(
        self,
        groups: Sequence[tuple[tuple[ClipIndex, ...], bool]],
        dataset: WorldDataset,
        indices: Sequence[int],
        step: int,
        *,
        with_clean: bool,
    ) -> list[ClipMicroBatch]:
        """The clips at the places of each group of a rollout, and whether they count; prompt p is that of row `indices[p]`.

        What clips of a prompt have in common is read once. `with_clean`: whether training needs the rows' own clips.
        """
        with_clips = with_clean or self.config.world.conditional_frames[1] > 0
        own_indices = (indices[place.prompt] for places, counted in groups if counted for place in places)
        clean = self.clean(dataset, own_indices) if with_clips else {}
        text_of = cache(lambda prompt: self.texts.read([prompt]))

        def micro_batch(places: tuple[ClipIndex, ...], counted: bool) -> ClipMicroBatch:
            rows = tuple(dataset[indices[place.prompt]] for place in places)
            prompts = {row.prompt for row in rows}
            texts = [text_of(row.prompt) for row in rows]

            def clean_of(place: ClipIndex) -> Tensor:
                return clean[indices[place.prompt]] if counted else torch.zeros(self.shape)

            return ClipMicroBatch(
                places=places,
                counted=counted,
                rows=rows,
                start=start_noise(places, self.shape, self.config, step),
                # Without a copy for each clip: of Cosmos one has 98 MB where it is not projected.
                text=texts[0].expand(len(rows), -1, -1) if len(prompts) == 1 else torch.cat(texts),
                conditioning=build_conditioning(places, clean_of, self.config, step),
                clean=torch.stack([clean_of(place) for place in places]) if with_clean else None,
            )

        return [micro_batch(*group) for group in groups]

    def make_real_batch(
        self,
        places: tuple[ClipIndex, ...],
        counted: bool,
        clean: Mapping[ClipIndex, Tensor],
        dataset: WorldDataset,
        indices: Sequence[int],
        step: int,
    ) -> ClipMicroBatch:
        """The rows' own clips, with their own noise, for flow matching.

        Args:
            clean: latents `[C, T, h, w]` of this rank's clips; of a stand-in there may be none.
        """
        rows = tuple(dataset[indices[place.prompt]] for place in places)
        latents = {place: clean.get(place, torch.zeros(self.shape)) for place in places}
        return ClipMicroBatch(
            places=places,
            counted=counted,
            rows=rows,
            start=clip_noise(places, self.shape, self.config.train.seed, step, "start"),
            text=self.texts.read([row.prompt for row in rows]),
            conditioning=build_conditioning(places, latents.__getitem__, self.config, step),
            clean=torch.stack([latents[place] for place in places]),
        )


def read_clips(dataset: WorldDataset, size: ClipSize, rows: Sequence[int]) -> list[Clip]:
    """uint8 `[3, T, H, W]` of each row, or what is wrong with it."""
    clips: list[Clip] = []
    for row in rows:
        try:
            clips.append(dataset.read_clip(dataset[row], size))
        except DataError as error:
            clips.append(error)
    return clips


def read_ahead(
    config: WorldConfig, dataset: WorldDataset, order: StepOrder, share: ClipShare, first_step: int
) -> Iterator[list[Clip]]:
    """This rank's clips of each step from `first_step` on, read by worker processes ahead of training."""
    data, places = config.data, own_places(order.batch_size, share)
    tasks = ([order.indices(step)[place.prompt] for place in places] for step in range(first_step, order.num_steps))
    ahead = ceil(data.prefetch / data.workers) if data.workers else None
    return run_in_workers(partial(read_clips, dataset, clip_size(data)), tasks, workers=data.workers, ahead=ahead)


def open_inputs(config: WorldConfig, folder: Path, prompts: Sequence[str], codec: LatentCodec, world: World) -> Inputs:
    """Encode the prompts, all that the run will need, each rank its share, and free the encoder. Collective."""
    dtype = DTYPES[config.train.precision]
    length, project = config.model.max_prompt_length, is_projection_kept(config)
    texts = TextCache.open(find_family(folder), folder, length, dtype, get_cache_dir(), project=project)
    log.info("%d different prompts", len(prompts))
    with share_errors():  # every host has its own cache
        texts.encode(prompts, world.device, rank=world.local_rank, num_ranks=hosts.count_local_ranks())
    wait_for_ranks()
    with share_errors():
        texts.check_different(prompts)
    latents = LatentCache.open(codec, folder, dtype, get_cache_dir())
    size = clip_size(config.data)
    return Inputs(config, texts, latents, size, codec.shape(size))


def list_prompts(config: WorldConfig, datasets: tuple[WorldDataset, WorldDataset], order: StepOrder) -> list[str]:
    """The prompts of all steps and of validation, each once, and the negative one."""
    training, validation = datasets
    rows = (index for step in range(order.num_steps) for index in order.indices(step))
    prompts = dict.fromkeys(training[index].prompt for index in dict.fromkeys(rows))
    prompts |= dict.fromkeys(row.prompt for row in list_validation_rows(config, datasets))
    prompts |= dict.fromkeys(validation[index].prompt for index in list_loss_rows(config, validation))
    return [config.data.negative_prompt, *(prompt for prompt in prompts if prompt != config.data.negative_prompt)]


def list_validation_rows(config: WorldConfig, datasets: tuple[WorldDataset, WorldDataset]) -> list[WorldRow]:
    """List the rows whose prompts are sampled at every validation: held-out ones, or training rows if there are none."""
    training, validation = datasets
    source = validation if len(validation) else training
    limit = config.validation.max_samples
    return [source[index] for index in pick_evenly(len(source), limit)] if limit else []


def list_loss_rows(config: WorldConfig, validation: WorldDataset) -> list[int]:
    """The held-out rows whose clips the loss is measured on, evenly spaced; none if training has no such loss."""
    if config.world.algorithm not in ("sft", "ddrl"):
        return []
    return pick_evenly(len(validation), MOST_LOSSES)
