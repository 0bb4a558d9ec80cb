"""What all algorithms do with their losses: backward passes whose shares add up, and sums over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from dsreason.engine.engine import full_shape
from dsreason.job.ranks import gather_objects
from dsreason.world.training.build import WorldRun
from dsreason.world.training.clips import Sample

log = logging.getLogger(__name__)

LITTLE = 10
"""Gradients over Adam's epsilon of which a run is warned: with 10, steps are a tenth too short."""


def grad_over_eps(world: WorldRun, norm: float) -> float:
    """The root mean square of the gradient, clipped, over `optim.eps`; warns once where it is small.

    A log-probability is a mean over all N elements of a clip, and its gradient shrinks as 1/sqrt(N): for millions of them it
    may be as small as Adam's epsilon, with which Adam steps short.
    """
    if not math.isfinite(norm):
        return math.nan
    optim = world.config.optim
    count = sum(
        full_shape(parameter).numel() for parameter in world.engine.module.parameters() if parameter.requires_grad
    )
    found = min(norm, optim.max_grad_norm or norm) / math.sqrt(count) / optim.eps
    if 0 < found < LITTLE and not world.eps_told:
        world.eps_told = True
        log.warning(
            "step %d: the gradient's root mean square is only %.2g times optim.eps (%g), so that AdamW's steps are shorter than "
            "optim.lr says; set optim.eps = %.0e",
            *(world.state.step + 1, found, optim.eps, 10 ** math.floor(math.log10(found * optim.eps / 100))),
        )
    return found


def count_clips(world: WorldRun, part: Sequence[Sample]) -> int:
    """Of an optimizer step, over all ranks."""
    own = sum(len(one.batch) for one in part if one.batch.counted and world.share.leads)
    return sum(gather_objects(own))


def add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def gathered(world: WorldRun, sums: Mapping[str, float]) -> dict[str, float]:
    """The sums over all ranks; of a context-parallel group, whose ranks have the same, one counts."""
    found = gather_objects(dict(sums) if world.share.leads else {})
    names = dict.fromkeys(name for part in found for name in part)
    return {name: sum(part.get(name, 0.0) for part in found) for name in names}
