"""Gradients for DiffusionNFT (2509.16117), which adds fresh noise to sampled clips and compares velocities at these points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.engine.engine import add_gradient
from dsreason.engine.reference import ReferencePolicy
from dsreason.job.ranks import World
from dsreason.phases import record_phase
from dsreason.world.losses import compute_kl_velocity, compute_nft_loss, compute_optimality
from dsreason.world.noise import make_generator
from dsreason.world.schema import WorldConfigSection
from dsreason.world.training.clips import ClipIndex, SampledClips, draw_clip_noise, to_lossless_bfloat16
from dsreason.world.training.gradients import add_values, count_clips, sum_over_ranks
from dsreason.world.training.velocity import ClipMaker, build_velocity

MOST = 0.99
"""Share of the sampler's noise levels at which the model is trained on each clip if `nft_times` is unset."""


def count_times(config: WorldConfigSection) -> int:
    """Return the number of noise levels at which the model is trained on each clip."""
    steps = config.sampling_steps
    return min(steps, config.nft_times or max(1, int(steps * MOST)))


def draw_levels(maker: ClipMaker, places: Sequence[ClipIndex], step: int) -> Tensor:
    """Draw noise levels for each clip from the sampler's levels (without 0), in random order: `[B, times]`."""
    levels, count = maker.sigmas[:-1].float(), count_times(maker.config.world)
    orders = [
        make_generator(maker.config.train.seed, step, place.prompt, place.clip, "times").permutation(len(levels))[
            :count
        ]
        for place in places
    ]
    return torch.stack([levels[torch.from_numpy(order)] for order in orders])


def add_noise(maker: ClipMaker, sample: SampledClips, number: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Add noise to each clip, at the `number`-th noise level drawn for it (counted from 0).

    Returns:
        The noisy latents x_s `[B, C, T, h, w]`, the noise levels s `[B]` and the noise, on the transformer's device.
    """
    places = sample.batch.places
    times = draw_levels(maker, places, step)[:, number]
    noise = draw_clip_noise(places, maker.inputs.shape, maker.config.train.seed, step, f"time {number}")
    s = times.view(-1, 1, 1, 1, 1)
    x = (1 - s) * sample.latents + s * noise
    return x.to(maker.device), times.to(maker.device), noise.to(maker.device)


@torch.no_grad()
def add_velocities(maker: ClipMaker, sample: SampledClips, step: int, name: str) -> SampledClips:
    """Return the sample with the current weights' velocities at all noise levels drawn for it. Collective."""
    velocities = {}
    for number in range(count_times(maker.config.world)):
        x, s, noise = add_noise(maker, sample, number, step)
        batch = replace(sample.batch.to(maker.device), start=noise)
        velocities[number] = to_lossless_bfloat16(
            build_velocity(maker, batch, maker.config.world.guidance_scale)(x, s)
        ).cpu()
    return replace(sample, fixed={**sample.fixed, name: velocities})


def add_old_velocities(maker: ClipMaker, sample: SampledClips, step: int) -> SampledClips:
    """Return the sample with the old policy's velocities; the transformer must hold the old policy's weights."""
    return add_velocities(maker, sample, step, "old")


def add_reference(
    maker: ClipMaker, reference: ReferencePolicy | None, parts: Sequence[Sequence[SampledClips]], step: int
) -> list[list[SampledClips]]:
    """Return the samples; if there is a KL term, add the reference's velocities. Collective."""
    if reference is None:
        return [list(part) for part in parts]
    with reference.in_place():
        return [[add_velocities(maker, sample, step, "reference") for sample in part] for part in parts]


def compute_loss(maker: ClipMaker, sample: SampledClips, number: int, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each clip's loss and metrics (`[B]` each) at the `number`-th noise level drawn for it (counted from 0)."""
    config, device = maker.config.world, maker.device
    x, s, noise = add_noise(maker, sample, number, step)
    batch = replace(sample.batch.to(device), start=noise)
    v = build_velocity(maker, batch, config.guidance_scale)(x, s)
    old = sample.fixed["old"][number].to(device, torch.float32)
    result = compute_nft_loss(
        v,
        old,
        noisy=x,
        clean=sample.latents.to(device),
        times=s,
        optimal=compute_optimality(sample.advantages.to(device), config.advantage_clip),
        beta=config.nft_beta,
        scale=config.advantage_clip,
        free=batch.free,
    )
    loss = result.loss
    metrics = {
        "policy/positive": result.positive,
        "policy/negative": result.negative,
        "policy/old_distance": compute_kl_velocity(v.detach(), old, batch.free),
    }
    if "reference" in sample.fixed:
        reference = sample.fixed["reference"][number].to(device, torch.float32)
        kl = compute_kl_velocity(v, reference, batch.free)
        loss = loss + config.kl_coef * kl
        metrics["policy/kl"] = kl.detach()
    return loss, metrics


def accumulate_gradients(
    maker: ClipMaker, engine: DeepSpeedEngine, samples: Sequence[SampledClips], *, rollout_step: int, world: World
) -> dict[str, float]:
    """Run the forward and backward passes for every clip and noise level, to accumulate the optimizer step's gradient.

    Returns:
        The step's metrics.
    """
    count, num_clips = count_times(maker.config.world), count_clips([sample.batch for sample in samples], maker.share)
    sums: dict[str, float] = {}
    items = [(sample, number) for sample in samples for number in range(count)]
    for i, (sample, number) in enumerate(items):  # forward passes are collective; all ranks run the same number of them
        with record_phase("forward"):
            loss, metrics = compute_loss(maker, sample, number, rollout_step)
        share = float(sample.batch.counted) / (num_clips * count)
        total = loss.sum() * share
        add_gradient(engine, total, world.size, last=i == len(items) - 1)
        add_values(sums, {"train/loss": total.item()} | {name: float(v.sum()) * share for name, v in metrics.items()})
    return sum_over_ranks(sums, maker.share)
