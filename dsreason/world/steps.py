"""Deterministic and stochastic sampler steps, and the log-probabilities of stochastic steps.

Latents at noise level s are x = (1 − s)·data + s·noise, and the model predicts v = noise − data. Every kind of step from s
to s' < s is affine: x' = a·x + b·v + std·ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dsreason.world.losses import average_free

Kind = Literal["ode", "flow", "cps", "dance", "ddim"]

NEAR_ONE = 0.998
"""Noise level above which `flow` computes 1 − s from the schedule's second noise level. Flow-GRPO does so only at s = 1, but
Wan's published schedules start at 0.999999, where the noise would be a thousand times too large. Cosmos' schedules start at
0.995 and are not affected."""


@dataclass(frozen=True)
class Step:
    """Coefficients of the step x' = a·x + b·v + std·ε."""

    a: float
    b: float
    std: float


def build_step(kind: Kind, s: float, s_next: float, eta: float = 0.0, s_cap: float = 0.0) -> Step:
    """Return the step from noise level `s` to `s_next`.

    Args:
        kind: `ode` (Euler); `flow` (Flow-GRPO, arXiv 2505.05470); `dance` (DanceGRPO, 2505.07818); `cps` (2509.05952); `ddim`
            (DDIM's noise in these coordinates). With `eta` = 0, all kinds equal `ode`.
        eta: scale of the noise that the step adds.
        s_cap: second noise level of the schedule, which `flow` needs near s = 1.
    """
    if not 0 <= s_next < s <= 1 or eta < 0:
        raise ValueError(f"build_step: requires 0 <= s_next < s <= 1 and eta >= 0; got {s=}, {s_next=} and {eta=}")
    if kind == "ode":
        return Step(1.0, s_next - s, 0.0)
    if kind == "flow":
        return _make_diffusion_step(s, s_next, eta**2 * s / (1 - (min(s, s_cap) if s > NEAR_ONE else s)))
    if kind == "dance":
        return _make_diffusion_step(s, s_next, eta**2)
    return _make_resampled_step(s, s_next, _compute_fresh_noise(kind, s, s_next, eta))


def _make_diffusion_step(s: float, s_next: float, variance: float) -> Step:
    """Return the Euler-Maruyama step of dx = (v + g²/(2s)·(x + (1 − s)·v)) ds + g dw, with g² = `variance`.

    In the limit of small steps, it has the same marginals as the ODE.
    """
    dt = s_next - s
    drift = variance / (2 * s) * dt
    return Step(1 + drift, dt + drift * (1 - s), math.sqrt(variance * -dt))


def _compute_fresh_noise(kind: Kind, s: float, s_next: float, eta: float) -> float:
    """Return the standard deviation of the fresh noise at s'; the rest of the noise at s' is the predicted noise."""
    if eta > 1:
        raise ValueError(f"build_step: eta must be at most 1 with {kind}; got {eta}")
    if kind == "cps":
        return s_next * math.sin(eta * math.pi / 2)
    return eta * s_next * math.sqrt(max(0.0, 1 - (s_next * (1 - s) / (s * (1 - s_next))) ** 2))


def _make_resampled_step(s: float, s_next: float, std: float) -> Step:
    """Return the step that remixes predicted data x0 and noise x1 at s': (1 − s')·x0 + k·x1 + std·ε with k² + std² = s'².

    Here x0 = x − s·v and x1 = x + (1 − s)·v.
    """
    kept_std = math.sqrt(max(0.0, s_next**2 - std**2))
    return Step((1 - s_next) + kept_std, -(1 - s_next) * s + kept_std * (1 - s), std)


def compute_mean(step: Step, x: Tensor, v: Tensor) -> Tensor:
    """Return the expected latents after the step, with the shape of `x`."""
    return step.a * x + step.b * v


def log_prob(x_next: Tensor, mean: Tensor, std: float, free: Tensor | None = None) -> Tensor:
    """Return the log-density of `x_next` under N(`mean`, `std`²), **averaged** over elements: `[B]`.

    Args:
        x_next, mean: `[B, C, T, h, w]`, float32.
        std: standard deviation of the step, above 0.
        free: `[B, 1, T, 1, 1]`, 1 for sampled frames, 0 for given frames, which have no probability; None if all are sampled.
    """
    if std <= 0:
        raise ValueError(f"log_prob: the step adds no noise ({std=}), so it has no density and cannot be trained")
    density = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return average_free(density, free)
