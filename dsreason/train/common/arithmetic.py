"""How much of what the devices could compute, and of what they did compute, was work on samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine

from dsreason.data.types import Batch
from dsreason.job.ranks import World, all_sum, broadcast_object
from dsreason.monitor.flops import ModelFlops, Work, model_flops, peak_flops


@dataclass(frozen=True)
class Arithmetic:
    """What a model costs, and what the devices of a job can do."""

    flops: ModelFlops
    peak: float | None
    """FLOP/s of all devices together; None if the device's peak is not known."""
    ranks_per_row: int = 1
    """So many ranks do the same work together, and all of them count it."""

    def metrics(self, work: Work, batches: Sequence[Batch], seconds: float) -> dict[str, float]:
        """Of one step on all ranks, for this rank's part of it. Collective.

        `perf/mfu`: FLOPs of the forward and backward pass of the samples, per second of `seconds`, over the peak; what is
        computed again in the backward pass, padding, and passes without gradients do not count. `seconds` are in SFT the
        whole step with its wait for data, in GRPO `time/train`, without sampling: in the first step after a rollout that
        has the passes of the old policy and the reference in it. `perf/padding`: the share of the tokens computed that
        belong to no sample: padding, and media that only keep ranks in step.
        """
        computed = all_sum(sum(batch.input_ids.numel() for batch in batches))
        metrics = {"perf/padding": 1 - all_sum(work.tokens) / max(computed, 1)}
        if self.peak is not None:
            metrics["perf/mfu"] = all_sum(self.flops.step(work)) / self.ranks_per_row / seconds / self.peak
        return metrics


def arithmetic_of(engine: DeepSpeedEngine, world: World) -> Arithmetic:
    """Every rank calls it, and gets one answer: counting is a collective."""
    return Arithmetic(model_flops(engine.module.model), broadcast_object(job_peak_flops(world)), world.ranks_per_row)


def job_peak_flops(world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    return None if peak is None else peak * world.size
