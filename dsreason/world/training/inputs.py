"""A clip's inputs besides the noise: its prompt's embedding, and the latents of its row's real clip."""

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
from dsreason.job import network
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
    draw_clip_noise,
    draw_start_noise,
    list_local_places,
)
from dsreason.world.training.preflight import get_clip_size, is_projection_kept
from dsreason.world.types import ClipSize, WorldRow

log = logging.getLogger(__name__)

Clip = Tensor | DataError

MOST_LOSSES = 64
"""Maximum number of held-out clips whose loss a validation measures."""


@dataclass(frozen=True)
class Inputs:
    """A builder of micro-batches that reads embeddings and latents from the cache."""

    config: WorldConfig
    texts: TextCache
    latents: LatentCache
    size: ClipSize
    shape: tuple[int, int, int, int]
    """Shape of a clip's latents."""

    def negative(self, count: int) -> Tensor:
        """Return the embedding of the negative prompt, repeated `count` times: `[count, L, D]`."""
        return self._negative.expand(count, -1, -1)

    @cached_property
    def _negative(self) -> Tensor:
        return self.texts.read([self.config.data.negative_prompt])

    def clean(self, dataset: WorldDataset, rows: Iterable[int]) -> dict[int, Tensor]:
        """Return the latents of the rows' clips: row → `[C, T, h, w]`. Worker processes read each clip once.

        Raises:
            DataError: a row's clip is unusable.
        """
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

    def build_micro_batches(
        self,
        groups: Sequence[tuple[tuple[ClipIndex, ...], bool]],
        dataset: WorldDataset,
        indices: Sequence[int],
        step: int,
        *,
        with_clean: bool,
    ) -> list[ClipMicroBatch]:
        """Build the micro-batches for a rollout. Embeddings and latents that several clips share are read once.

        Args:
            groups: for each micro-batch, the indices of its clips and whether they count towards the loss.
            indices: row index of each prompt.
            with_clean: whether training needs the rows' real clips.
        """
        with_clips = with_clean or self.config.world.conditional_frames[1] > 0
        own_indices = (indices[place.prompt] for places, counted in groups if counted for place in places)
        clean = self.clean(dataset, own_indices) if with_clips else {}
        text_of = cache(lambda prompt: self.texts.read([prompt]))

        def build_micro_batch(places: tuple[ClipIndex, ...], counted: bool) -> ClipMicroBatch:
            rows = tuple(dataset[indices[place.prompt]] for place in places)
            prompts = {row.prompt for row in rows}
            texts = [text_of(row.prompt) for row in rows]

            def clean_of(place: ClipIndex) -> Tensor:
                return clean[indices[place.prompt]] if counted else torch.zeros(self.shape)

            return ClipMicroBatch(
                places=places,
                counted=counted,
                rows=rows,
                start=draw_start_noise(places, self.shape, self.config, step),
                # Clips with the same prompt share its embedding, which takes 98 MB for Cosmos unless it is projected.
                text=texts[0].expand(len(rows), -1, -1) if len(prompts) == 1 else torch.cat(texts),
                conditioning=build_conditioning(places, clean_of, self.config, step),
                clean=torch.stack([clean_of(place) for place in places]) if with_clean else None,
            )

        return [build_micro_batch(*group) for group in groups]

    def make_real_batch(
        self,
        places: tuple[ClipIndex, ...],
        counted: bool,
        clean: Mapping[ClipIndex, Tensor],
        dataset: WorldDataset,
        indices: Sequence[int],
        step: int,
    ) -> ClipMicroBatch:
        """Build a micro-batch for flow matching: real clips, each with its own noise.

        Args:
            clean: latents `[C, T, h, w]` of this rank's clips; a stand-in's latents may be missing.
        """
        rows = tuple(dataset[indices[place.prompt]] for place in places)
        latents = {place: clean.get(place, torch.zeros(self.shape)) for place in places}
        return ClipMicroBatch(
            places=places,
            counted=counted,
            rows=rows,
            start=draw_clip_noise(places, self.shape, self.config.train.seed, step, "start"),
            text=self.texts.read([row.prompt for row in rows]),
            conditioning=build_conditioning(places, latents.__getitem__, self.config, step),
            clean=torch.stack([latents[place] for place in places]),
        )


def read_clips(dataset: WorldDataset, size: ClipSize, rows: Sequence[int]) -> list[Clip]:
    """Read each row's clip, uint8 `[3, T, H, W]`. If a clip is unusable, the list contains its error instead."""
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
    """Yield this rank's clips for each step from `first_step` on; worker processes read them ahead of training."""
    data, places = config.data, list_local_places(order.batch_size, share)
    tasks = ([order.indices(step)[place.prompt] for place in places] for step in range(first_step, order.num_steps))
    ahead = ceil(data.prefetch / data.workers) if data.workers else None
    return run_in_workers(partial(read_clips, dataset, get_clip_size(data)), tasks, workers=data.workers, ahead=ahead)


def open_inputs(config: WorldConfig, folder: Path, prompts: Sequence[str], codec: LatentCodec, world: World) -> Inputs:
    """Split the run's prompts across the ranks, encode them, free the encoder, and return the inputs. Collective."""
    dtype = DTYPES[config.train.precision]
    length, project = config.model.max_prompt_length, is_projection_kept(config)
    texts = TextCache.open(find_family(folder), folder, length, dtype, get_cache_dir(), project=project)
    log.info("%d distinct prompts", len(prompts))
    with share_errors():  # every host has its own cache
        texts.encode(prompts, world.device, rank=world.local_rank, num_ranks=network.count_local_ranks())
    wait_for_ranks()
    with share_errors():
        texts.check_different(prompts)
    latents = LatentCache.open(codec, folder, dtype, get_cache_dir())
    size = get_clip_size(config.data)
    return Inputs(config, texts, latents, size, codec.shape(size))


def list_prompts(config: WorldConfig, datasets: tuple[WorldDataset, WorldDataset], order: StepOrder) -> list[str]:
    """Return the negative prompt, followed by the distinct prompts for all steps and for validation."""
    training, validation = datasets
    rows = (index for step in range(order.num_steps) for index in order.indices(step))
    prompts = dict.fromkeys(training[index].prompt for index in dict.fromkeys(rows))
    prompts |= dict.fromkeys(row.prompt for row in list_validation_rows(config, datasets))
    prompts |= dict.fromkeys(validation[index].prompt for index in list_loss_rows(config, validation))
    return [config.data.negative_prompt, *(prompt for prompt in prompts if prompt != config.data.negative_prompt)]


def list_validation_rows(config: WorldConfig, datasets: tuple[WorldDataset, WorldDataset]) -> list[WorldRow]:
    """Return the rows whose prompts each validation samples clips for: held-out rows, or training rows if none are held out."""
    training, validation = datasets
    source = validation if len(validation) else training
    limit = config.validation.max_samples
    return [source[index] for index in pick_evenly(len(source), limit)] if limit else []


def list_loss_rows(config: WorldConfig, validation: WorldDataset) -> list[int]:
    """Return evenly spaced held-out rows to measure the loss on; empty if training has no loss on real clips."""
    if config.world.algorithm not in ("sft", "ddrl"):
        return []
    return pick_evenly(len(validation), MOST_LOSSES)
