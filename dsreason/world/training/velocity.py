"""The components that sample clips, and the policy's velocity, which sampling, training and validation compute identically."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from dsreason.world.families import WorldFamily
from dsreason.world.latents import LatentCodec
from dsreason.world.noise import compute_sigmas
from dsreason.world.rewards.scorer import ClipScorer
from dsreason.world.sampler import Velocity, apply_guidance
from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import ClipMicroBatch, ClipShare
from dsreason.world.training.inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class ClipMaker:
    """The components that sample and score clips, in training and evaluation."""

    config: WorldConfig
    family: WorldFamily
    model_path: Path
    transformer: nn.Module
    """The transformer, or the DeepSpeed engine that wraps it."""
    codec: LatentCodec
    inputs: Inputs
    share: ClipShare
    scorer: ClipScorer | None
    """The scorer; None on ranks that do not lead their share, and in runs without rewards, which have no rollouts."""
    device: torch.device

    @cached_property
    def sigmas(self) -> Tensor:
        """Noise levels of a rollout: `[sampling_steps + 1]`, float64, decreasing to 0."""
        return compute_sigmas(self.config, self.model_path)


def build_velocity(maker: ClipMaker, batch: ClipMicroBatch, scale: float) -> Velocity:
    """Return a function that computes the policy's velocity, with guidance, for a micro-batch.

    Args:
        batch: clips, with their tensors on the transformer's device.
        scale: guidance scale; 1 disables guidance.
    """
    transformer, family = maker.transformer, maker.family
    if scale == 1:
        return lambda x, s: family.velocity(transformer, x, s, batch.text, batch.conditioning, batch.start)
    # A single forward pass processes both prompts, so that the backward pass visits each weight once.
    both = add_negative(batch, maker.inputs.negative(len(batch)).to(batch.text))

    def guided_velocity(x: Tensor, s: Tensor) -> Tensor:
        v = family.velocity(transformer, torch.cat([x, x]), torch.cat([s, s]), both.text, both.conditioning, both.start)
        positive, negative = v.chunk(2)
        return apply_guidance(positive, negative, scale)

    return guided_velocity


def add_negative(batch: ClipMicroBatch, negative: Tensor) -> ClipMicroBatch:
    """Return a micro-batch that contains each clip twice: first with its own prompt, then with the negative prompt."""
    conditioning = batch.conditioning
    if conditioning is not None:
        latents, mask = torch.cat([conditioning.latents] * 2), torch.cat([conditioning.mask] * 2)
        conditioning = replace(conditioning, latents=latents, mask=mask)
    return replace(
        batch, start=torch.cat([batch.start] * 2), text=torch.cat([batch.text, negative]), conditioning=conditioning
    )


def restore_given_frames(latents: Tensor, batch: ClipMicroBatch) -> Tensor:
    """Return the latents with the given frames replaced by their original values."""
    if batch.conditioning is None:
        return latents
    return torch.where(batch.conditioning.mask.bool(), batch.conditioning.latents, latents)
