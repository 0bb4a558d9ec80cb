"""The policy's velocity of a micro-batch: one function for sampling, training and validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from dsreason.world.families import WorldFamily
from dsreason.world.latents import LatentCodec
from dsreason.world.rewards import ClipScorer
from dsreason.world.sampler import Velocity, guided
from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import MicroBatch, Share
from dsreason.world.training.inputs import Inputs
from dsreason.world.types import ClipSize


class ClipMaker(Protocol):
    """What sampling and scoring clips takes: a run has it, and so has an evaluation."""

    @property
    def config(self) -> WorldConfig: ...
    @property
    def family(self) -> WorldFamily: ...
    @property
    def model_path(self) -> Path: ...
    @property
    def engine(self) -> nn.Module:
        """The transformer, or the DeepSpeed engine around it."""

    @property
    def codec(self) -> LatentCodec: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def share(self) -> Share: ...
    @property
    def size(self) -> ClipSize: ...
    @property
    def scorer(self) -> ClipScorer | None: ...
    @property
    def device(self) -> torch.device: ...


def velocity_of(world: ClipMaker, batch: MicroBatch, scale: float) -> Velocity:
    """The policy's velocity of these clips with guidance: one function for sampling and for training.

    Args:
        batch: on the engine's device.
    """
    transformer, family = world.engine, world.family
    if scale == 1:
        return lambda x, s: family.velocity(transformer, x, s, batch.text, batch.conditioning, batch.start)
    # Both halves go through one forward, so that a backward pass sees each weight once.
    twice = doubled(batch, world.inputs.negative(len(batch)).to(batch.text))

    def guided_velocity(x: Tensor, s: Tensor) -> Tensor:
        both = family.velocity(
            transformer, torch.cat([x, x]), torch.cat([s, s]), twice.text, twice.conditioning, twice.start
        )
        positive, negative = both.chunk(2)
        return guided(positive, negative, scale)

    return guided_velocity


def doubled(batch: MicroBatch, negative: Tensor) -> MicroBatch:
    """The clips with their prompts, and behind them the same with the negative prompt."""
    given = batch.conditioning
    if given is not None:
        given = replace(given, latents=torch.cat([given.latents] * 2), mask=torch.cat([given.mask] * 2))
    return replace(
        batch, start=torch.cat([batch.start] * 2), text=torch.cat([batch.text, negative]), conditioning=given
    )


def with_given(latents: Tensor, batch: MicroBatch) -> Tensor:
    """With the given frames as they were given."""
    if batch.conditioning is None:
        return latents
    return torch.where(batch.conditioning.mask.bool(), batch.conditioning.latents, latents)
