"""The gradients of DiffusionNFT (2509.16117): final clips, noised anew, and the velocities of the old policy there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsreason.engine.engine import add_gradient
from dsreason.phases import record_phase
from dsreason.world.losses import kl_velocity, nft_loss, optimality
from dsreason.world.noise import generator
from dsreason.world.training.build import WorldRun
from dsreason.world.training.clips import Place, Sample, clip_noise, halved
from dsreason.world.training.gradients import add, count_clips, gathered
from dsreason.world.training.velocity import velocity_of

MOST = 0.99
"""Share of the sampler's noise levels that is trained where `nft_times` is unset."""


def num_times(world: WorldRun) -> int:
    steps = world.config.world.sampling_steps
    return min(steps, world.config.world.nft_times or max(1, int(steps * MOST)))


def times_of(world: WorldRun, places: Sequence[Place], step: int) -> Tensor:
    """`[B, times]`: noise levels of the sampler's, each clip's own, in an order drawn anew. Level 0 is none of them."""
    levels, count = world.sigmas[:-1].float(), num_times(world)
    orders = [
        generator(world.config.train.seed, step, place.prompt, place.clip, "times").permutation(len(levels))[:count]
        for place in places
    ]
    return torch.stack([levels[torch.from_numpy(order)] for order in orders])


def noised(world: WorldRun, one: Sample, number: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_s `[B, C, T, h, w]`, s `[B]` and the noise of a clip's time `number`, on the engine's device."""
    times = times_of(world, one.batch.places, step)[:, number]
    noise = clip_noise(one.batch.places, world.shape, world.config.train.seed, step, f"time {number}")
    s = times.view(-1, 1, 1, 1, 1)
    x = (1 - s) * one.latents + s * noise
    return x.to(world.device), times.to(world.device), noise.to(world.device)


@torch.no_grad()
def with_velocities(world: WorldRun, one: Sample, step: int, name: str) -> Sample:
    """The sample with the velocities, at its times, of the weights that the engine holds. Collective."""
    found = {}
    for number in range(num_times(world)):
        x, s, noise = noised(world, one, number, step)
        batch = replace(one.batch.to(world.device), start=noise)
        found[number] = halved(velocity_of(world, batch, world.config.world.guidance_scale)(x, s)).cpu()
    return replace(one, fixed={**one.fixed, name: found})


def with_old_velocities(world: WorldRun, one: Sample, step: int) -> Sample:
    """Of the policy that sampled; the caller has put it in place."""
    return with_velocities(world, one, step, "old")


def with_reference(world: WorldRun, parts: Sequence[Sequence[Sample]], step: int) -> list[list[Sample]]:
    """The samples with the reference's velocities, where there is a KL. Collective."""
    if world.reference is None:
        return [list(part) for part in parts]
    with world.reference.in_place():
        return [[with_velocities(world, one, step, "reference") for one in part] for part in parts]


def step_loss(world: WorldRun, one: Sample, number: int, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each clip at one of its times, `[B]`, and what is shown, `[B]`."""
    config = world.config.world
    x, s, noise = noised(world, one, number, step)
    batch = replace(one.batch.to(world.device), start=noise)
    v = velocity_of(world, batch, config.guidance_scale)(x, s)
    old = one.fixed["old"][number].to(world.device, torch.float32)
    result = nft_loss(
        v,
        old,
        noisy=x,
        clean=one.latents.to(world.device),
        times=s,
        optimal=optimality(one.advantages.to(world.device), config.advantage_clip),
        beta=config.nft_beta,
        scale=config.advantage_clip,
        free=batch.free,
    )
    loss = result.loss
    found = {
        "policy/positive": result.positive,
        "policy/negative": result.negative,
        "policy/old_distance": kl_velocity(v.detach(), old, batch.free),
    }
    if "reference" in one.fixed:
        reference = one.fixed["reference"][number].to(world.device, torch.float32)
        kl = kl_velocity(v, reference, batch.free)
        loss = loss + config.kl_coef * kl
        found["policy/kl"] = kl.detach()
    return loss, found


def accumulate(world: WorldRun, part: Sequence[Sample], rollout_step: int) -> dict[str, float]:
    """Forward and backward of every clip at every of its times; the gradient is that of the whole optimizer step."""
    count, num_clips = num_times(world), count_clips(world, part)
    sums: dict[str, float] = {}
    items = [(one, number) for one in part for number in range(count)]
    for i, (one, number) in enumerate(items):  # every rank runs the same number: forwards are collectives
        with record_phase("forward"):
            loss, found = step_loss(world, one, number, rollout_step)
        share = float(one.batch.counted) / (num_clips * count)
        total = loss.sum() * share
        add_gradient(world.engine, total, world.world.size, last=i == len(items) - 1)
        add(sums, {"train/loss": total.item()} | {name: float(v.sum()) * share for name, v in found.items()})
    return gathered(world, sums)
