"""Device utilisation: how much of the peak FLOP/s, and how many of the computed tokens, are spent on samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from dsreason.data.types import Batch
from dsreason.job.ranks import World, broadcast_object, reduce_sum
from dsreason.monitor.flops import ModelFlops, Work, compute_model_flops, find_peak_flops


@dataclass(frozen=True)
class UtilisationMeter:
    """A meter of device utilisation, based on the FLOPs that the model needs and the peak FLOP/s of the job's devices."""

    flops: ModelFlops
    peak: float | None
    """Peak FLOP/s of all devices together; None if the peak of this type of device is unknown."""
    ranks_per_row: int = 1
    """Number of ranks that compute a row together; each of them reports the work for the full row."""

    def metrics(self, work: Work, batches: Sequence[Batch], seconds: float) -> dict[str, float]:
        """Compute the utilisation in one step over all ranks. Collective.

        `perf/mfu` is the number of FLOPs in the samples' forward and backward passes, divided by `seconds` and by the peak.
        It excludes activations recomputed in the backward pass, padding, and passes without gradients. `perf/padding` is
        the share of the computed tokens that do not belong to a sample: padding, and dummy media that make all ranks run
        the same collectives.

        Args:
            work: this rank's work.
            batches: this rank's micro-batches.
            seconds: duration of the step. In SFT, it includes the wait for data. In GRPO, it is `time/train`, which
                excludes sampling; in the first step after a rollout, it includes the forward passes of the old policy and
                the reference.
        """
        computed = reduce_sum(sum(batch.input_ids.numel() for batch in batches))
        metrics = {"perf/padding": 1 - reduce_sum(work.tokens) / max(computed, 1)}
        if self.peak is not None:
            metrics["perf/mfu"] = reduce_sum(self.flops.step(work)) / self.ranks_per_row / seconds / self.peak
        return metrics


def build_utilisation_meter(engine: DeepSpeedEngine, world: World) -> UtilisationMeter:
    """Build the `UtilisationMeter` for a policy. Collective, because all ranks must agree on whether the peak is known."""
    return UtilisationMeter(
        compute_model_flops(engine.module.model), broadcast_object(find_job_peak_flops(world)), world.ranks_per_row
    )


def find_job_peak_flops(world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = find_peak_flops(torch.cuda.get_device_name(world.device))
    return None if peak is None else peak * world.size
