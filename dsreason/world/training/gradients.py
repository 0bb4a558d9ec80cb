"""Shared treatment of all algorithms' losses: backward passes whose shares add up, and sums over ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import OptimConfig
from dsreason.engine.engine import get_full_shape
from dsreason.job.ranks import gather_objects
from dsreason.world.training.clips import ClipMicroBatch, ClipShare

log = logging.getLogger(__name__)

LITTLE = 10
"""Gradients over Adam's epsilon of which a run is warned: with 10, steps are a tenth too short."""


@dataclass
class EpsilonCheck:
    """A comparison of gradients with Adam's epsilon, which warns once per process if they are small.

    A log-probability is a mean over all N elements of a clip, and its gradient shrinks as 1/sqrt(N): for millions of them it
    may be as small as Adam's epsilon, with which Adam steps short.
    """

    optim: OptimConfig
    has_warned: bool = False

    def measure(self, engine: DeepSpeedEngine, norm: float, step: int) -> float:
        """Return the root mean square of the gradient of this norm, clipped, over `optim.eps`."""
        if not math.isfinite(norm):
            return math.nan
        optim = self.optim
        count = sum(
            get_full_shape(parameter).numel() for parameter in engine.module.parameters() if parameter.requires_grad
        )
        ratio = min(norm, optim.max_grad_norm or norm) / math.sqrt(count) / optim.eps
        if 0 < ratio < LITTLE and not self.has_warned:
            self.has_warned = True
            log.warning(
                "step %d: the gradient's root mean square is only %.2g times optim.eps (%g), so that AdamW's steps are "
                "shorter than optim.lr says; set optim.eps = %.0e",
                *(step, ratio, optim.eps, 10 ** math.floor(math.log10(ratio * optim.eps / 100))),
            )
        return ratio


def count_clips(batches: Sequence[ClipMicroBatch], share: ClipShare) -> int:
    """Count the clips of an optimizer step over all ranks. Collective."""
    local = sum(len(batch) for batch in batches if batch.counted and share.leads)
    return sum(gather_objects(local))


def add_values(sums: dict[str, float], values: Mapping[str, float]) -> None:
    """Add each value to the sum of its name."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def sum_over_ranks(sums: Mapping[str, float], share: ClipShare) -> dict[str, float]:
    """Sum over all ranks; a context-parallel group, whose ranks all have the same sums, counts once. Collective."""
    parts = gather_objects(dict(sums) if share.leads else {})
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
