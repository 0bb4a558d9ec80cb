"""Helpers that all algorithms use for gradients and metrics."""

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
"""Ratio of gradients to Adam's epsilon below which a warning is logged; at 10, steps are about a tenth too short."""


@dataclass
class EpsilonCheck:
    """A check that compares gradients with Adam's epsilon and, once per process, logs a warning if they are too small.

    A log-probability is a mean over all N elements of a clip, so its gradient decreases as 1/sqrt(N). With millions of
    elements, it may be as small as Adam's epsilon, which shortens Adam's steps.
    """

    optim: OptimConfig
    has_warned: bool = False

    def measure(self, engine: DeepSpeedEngine, norm: float, step: int) -> float:
        """Return the ratio of the clipped gradient's root mean square to `optim.eps`; `norm` is the gradient's norm."""
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
                "step %d: the gradient's root mean square is only %.2g times optim.eps (%g), so AdamW's steps are shorter "
                "than optim.lr implies; set optim.eps = %.0e",
                *(step, ratio, optim.eps, 10 ** math.floor(math.log10(ratio * optim.eps / 100))),
            )
        return ratio


def count_clips(batches: Sequence[ClipMicroBatch], share: ClipShare) -> int:
    """Count the clips in an optimizer step across all ranks. Collective."""
    local_count = sum(len(batch) for batch in batches if batch.counted and share.leads)
    return sum(gather_objects(local_count))


def add_values(sums: dict[str, float], values: Mapping[str, float]) -> None:
    """Add each value to the entry of `sums` with the same name."""
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def sum_over_ranks(sums: Mapping[str, float], share: ClipShare) -> dict[str, float]:
    """Sum values over all ranks, but count each context-parallel group once, because its ranks have equal values. Collective."""
    parts = gather_objects(dict(sums) if share.leads else {})
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
