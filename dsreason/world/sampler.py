"""Sampling from noise to latents: by steps whose log-probabilities are kept, or by the solver of the model's own pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsreason.world.steps import Step, compute_mean, log_prob

Velocity = Callable[[Tensor, Tensor], Tensor]
"""`(x [B, C, T, h, w], s [B]) → v`, guidance included."""


@dataclass(frozen=True)
class Kept:
    """One step of a rollout, as training needs it."""

    x: Tensor
    """`[B, C, T, h, w]`, float32: before the step."""
    x_next: Tensor
    """After it."""
    log_prob: Tensor
    """`[B]`: of `x_next`, under the model that sampled."""


@dataclass(frozen=True)
class Sampled:
    latents: Tensor
    """`[B, C, T, h, w]`, float32."""
    trajectory: Mapping[int, Kept]
    """Values by the number of the step."""


def apply_guidance(v: Tensor, v_negative: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598); a scale of 1 is `v` itself."""
    return v + (scale - 1) * (v - v_negative)


@torch.no_grad()
def sample(
    velocity: Velocity,
    x0_noise: Tensor,
    sigmas: Tensor | Sequence[float],
    steps: Sequence[Step],
    noise_of: Callable[[int], Tensor],
    keep: Collection[int],
    free: Tensor | None = None,
) -> Sampled:
    """Latents of B clips.

    Args:
        x0_noise: `[B, C, T, h, w]`, float32, the noise to begin with.
        sigmas: `[len(steps) + 1]`, falling, the last one 0.
        steps: what happens between them.
        noise_of: number of a step → `[B, C, T, h, w]`; asked for steps that add noise only.
        keep: numbers of the steps that are trained; each must add noise.
        free: `[B, 1, T, 1, 1]`, 1 for sampled frames, 0 for given ones; None: all are sampled. Given frames follow the ODE,
            whatever the step, and have no log-probability.
    """
    levels = [float(s) for s in sigmas]
    if len(levels) != len(steps) + 1:
        raise ValueError(
            f"sample: {len(levels)} noise levels for {len(steps)} steps; there must be one more than steps"
        )
    x, trajectory = x0_noise.float(), {}
    for number, step in enumerate(steps):
        v = velocity(x, x.new_full((len(x),), levels[number]))
        expected = compute_mean(step, x, v)
        x_next = expected + step.std * noise_of(number).to(x) if step.std else expected
        if free is not None:
            x_next = torch.where(free.bool(), x_next, x + (levels[number + 1] - levels[number]) * v)
        if number in keep:
            trajectory[number] = Kept(x, x_next, log_prob(x_next, expected, step.std, free))
        x = x_next
    return Sampled(x, trajectory)


@torch.no_grad()
def solve(
    velocity: Velocity,
    noise: Tensor,
    scheduler: Any,
    steps: int,
    times: Callable[[Any], Tensor] = lambda scheduler: scheduler.sigmas[:-1],
) -> Tensor:
    """Return latents by the folder's own solver, equal to those of the pipeline.

    Args:
        scheduler: from `load_scheduler`; its state is reset.
        times: noise levels that the model gets: `solver_times` of its family.
    """
    scheduler.set_timesteps(steps)
    x = noise.float()
    for timestep, s in zip(scheduler.timesteps, times(scheduler), strict=True):
        v = velocity(x, x.new_full((len(x),), float(s)))
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
    return x
