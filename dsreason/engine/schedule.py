"""Learning-rate schedules, which are pure functions of the step."""

from __future__ import annotations

import math

from dsreason.config.schema import OptimConfig

WSD_SHARE = 0.2
"""Fraction of all steps during which the schedule `wsd` decays the learning rate if `optim.decay_share` is unset."""


def count_warmup_steps(total_steps: int, optim: OptimConfig) -> int:
    """Return the number of warmup steps, at most all steps of the schedule; an `optim.warmup` below 1 is a fraction of them."""
    total_steps = optim.schedule_steps or total_steps
    return round(optim.warmup * total_steps) if optim.warmup < 1 else min(int(optim.warmup), total_steps)


def describe_long_warmup(total_steps: int, optim: OptimConfig) -> str | None:
    """Return a warning if the warmup lasts for the entire run, or None otherwise."""
    warmup_steps = count_warmup_steps(total_steps, optim)
    if warmup_steps < total_steps:
        return None
    if warmup_steps > total_steps:
        reached = compute_lr_factor(total_steps - 1, total_steps, optim)
        return (
            f"optim.warmup ({warmup_steps} steps) is longer than the run ({total_steps} steps), which ends at {reached:.3g} of "
            "optim.lr; lower optim.warmup if you want the full rate"
        )
    warmup = f"{optim.warmup:g} steps" if optim.warmup >= 1 else f"{optim.warmup:g} of the run's steps"
    is_longer = optim.warmup > total_steps
    length = (
        f"longer than the run ({total_steps} steps) and is clipped to it"
        if is_longer
        else f"as long as the run ({total_steps} steps)"
    )
    return f"optim.warmup ({warmup}) is {length}, so optim.lr is reached only in the last step; lower optim.warmup"


def compute_lr_factor(step: int, total_steps: int, optim: OptimConfig) -> float:
    """Return the factor by which the peak learning rate is multiplied in `step`, which counts from 0.

    The factor rises linearly from `optim.warmup_start` to 1 at the last warmup step, and then follows `optim.schedule`, which
    reaches `optim.min_lr_share` at `total_steps` (one step after the last). If `optim.decay_share` is set, the factor decays
    only during that fraction of the steps, at the end of the run, and stays at 1 until then. `optim.schedule_steps` replaces
    `total_steps`.
    """
    total_steps = optim.schedule_steps or total_steps
    warmup = count_warmup_steps(total_steps, optim)
    if step < warmup:
        rise = step / (warmup - 1) if warmup > 1 else 1.0
        return optim.warmup_start + (1 - optim.warmup_start) * rise
    share = WSD_SHARE if optim.decay_share is None and optim.schedule == "wsd" else optim.decay_share
    start = warmup if share is None else max(warmup, total_steps - round(share * total_steps))
    progress = min(max(step - start, 0) / max(total_steps - start, 1), 1.0)
    return optim.min_lr_share + (1 - optim.min_lr_share) * _compute_decay(optim.schedule, progress)


def _compute_decay(schedule: str, progress: float) -> float:
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 - progress
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule in ("sqrt", "wsd"):
        return 1 - math.sqrt(progress)
    raise ValueError(f"optim.schedule must be one of constant, linear, cosine, sqrt, wsd; got {schedule!r}")
