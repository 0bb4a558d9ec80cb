"""Functions that sample latents from noise, either in steps with recorded log-probabilities or with the pipeline's solver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsreason.world.steps import Step, compute_mean, log_prob

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Velocity with guidance: `(x [B, C, T, h, w], s [B]) → v`."""


@dataclass(frozen=True)
class Kept:
    """A rollout step, recorded for training."""

    x: Tensor
    """Latents before the step: `[B, C, T, h, w]`, float32."""
    x_next: Tensor
    """Latents after the step, with the same shape and type."""
    log_prob: Tensor
    """Log-probability of `x_next` under the model that sampled the clips: `[B]`."""


@dataclass(frozen=True)
class Sampled:
    latents: Tensor
    """Sampled latents: `[B, C, T, h, w]`, float32."""
    trajectory: Mapping[int, Kept]
    """Step number → recorded step."""


def apply_guidance(v: Tensor, v_negative: Tensor, scale: float) -> Tensor:
    """Apply classifier-free guidance (arXiv 2207.12598); a scale of 1 returns `v` unchanged."""
    return v + (scale - 1) * (v - v_negative)


@torch.no_grad()
def sample(
    velocity: Velocity,
    x0_noise: Tensor,
    sigmas: Tensor | Sequence[float],
    steps: Sequence[Step],
    draw_noise: Callable[[int], Tensor],
    keep: Collection[int],
    free: Tensor | None = None,
) -> Sampled:
    """Sample the latents of B clips.

    Args:
        x0_noise: initial noise: `[B, C, T, h, w]`, float32.
        sigmas: noise levels, decreasing to 0: `[len(steps) + 1]`.
        steps: steps between consecutive noise levels.
        draw_noise: function from a step number to noise `[B, C, T, h, w]`; called only for steps that add noise.
        keep: numbers of the steps to record for training; each must add noise.
        free: `[B, 1, T, 1, 1]`, 1 for sampled frames, 0 for given ones; None if all are sampled. Given frames always follow
            the ODE and have no log-probability.
    """
    levels = [float(s) for s in sigmas]
    if len(levels) != len(steps) + 1:
        raise ValueError(
            f"sample: got {len(levels)} noise levels for {len(steps)} steps; {len(steps) + 1} are required"
        )
    x, trajectory = x0_noise.float(), {}
    for number, step in enumerate(steps):
        v = velocity(x, x.new_full((len(x),), levels[number]))
        expected = compute_mean(step, x, v)
        x_next = expected + step.std * draw_noise(number).to(x) if step.std else expected
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
    """Sample latents with the solver from the model's folder; the result equals the pipeline's.

    Args:
        scheduler: the solver from `load_scheduler`; its state is reset.
        times: function that returns the noise levels to pass to the model; see `WorldFamily.solver_times`.
    """
    scheduler.set_timesteps(steps)
    x = noise.float()
    for timestep, s in zip(scheduler.timesteps, times(scheduler), strict=True):
        v = velocity(x, x.new_full((len(x),), float(s)))
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
    return x
