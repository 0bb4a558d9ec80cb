"""Supervised training on real clips with flow matching (rectified flow, 2209.03003)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.engine.engine import add_gradient
from dsreason.errors import DataError
from dsreason.job.ranks import World, gather_objects, share_errors
from dsreason.phases import record_phase
from dsreason.world.data import WorldDataset
from dsreason.world.losses import compute_flow_matching_loss
from dsreason.world.noise import make_generator
from dsreason.world.training.clips import ClipIndex, ClipMicroBatch, group_local_clips, list_local_places
from dsreason.world.training.gradients import add_values, count_clips, sum_over_ranks
from dsreason.world.training.inputs import Clip, list_loss_rows, read_clips
from dsreason.world.training.velocity import ClipMaker, build_velocity

log = logging.getLogger(__name__)


def read_next_batches(
    maker: ClipMaker, dataset: WorldDataset, indices: Sequence[int], clips: Iterator[list[Clip]], step: int
) -> tuple[list[ClipMicroBatch], list[str]]:
    """Return this rank's micro-batches for the next step, and the errors for the rows that any rank skipped. Collective.

    Args:
        indices: indices of the step's rows.
        clips: this rank's clips, one list per step.

    Raises:
        DataError: a clip is unusable and `data.on_bad_row` is "error", or all clips in the step are unusable.
    """
    with share_errors():
        step_clips = next(clips)
    batches, skipped = make_batches(maker, dataset, indices, step_clips, step)
    if not batches:
        raise DataError(f"none of the {len(indices)} clips of step {step} can be used; first error: {skipped[0]}")
    return batches, skipped


def make_batches(
    maker: ClipMaker, dataset: WorldDataset, indices: Sequence[int], clips: Sequence[Clip], step: int
) -> tuple[list[ClipMicroBatch], list[str]]:
    """Build micro-batches from this rank's share of the rows. Collective.

    Args:
        clips: clips of the rows in this rank's share; see `list_local_places`.

    Returns:
        The micro-batches (the same number on every rank, and none if no rank has a usable clip), and the errors for the rows
        that any rank skipped.
    """
    config, share = maker.config, maker.share
    clean: dict[ClipIndex, Tensor] = {}
    bad: list[str] = []
    with share_errors():
        for place, clip in zip(list_local_places(len(indices), share), clips, strict=True):
            if not isinstance(clip, DataError):
                clean[place] = maker.inputs.latents.encode(clip[None])[0]
            elif config.data.on_bad_row == "error":
                raise clip
            else:
                bad.append(str(clip))
    reports = gather_objects((len(clean), bad) if share.leads else (0, []))
    skipped = [text for _, texts in reports for text in texts]
    if sum(count for count, _ in reports) == 0:
        return [], skipped
    groups = group_local_clips(
        [ClipIndex(number, 0) for number in range(len(indices))], share, config.train.micro_batch_size
    )
    batches = []
    with share_errors():
        for group, counted in groups:
            places = tuple(place for place in group if place in clean) if counted else ()
            batches.append(
                maker.inputs.make_real_batch(places or group[:1], bool(places), clean, dataset, indices, step)
            )
    return batches, skipped


def draw_times(places: Sequence[ClipIndex], shift: float, seed: int, step: int) -> Tensor:
    """Draw s = shift u / (1 + (shift - 1) u) with logit-normal u: `[B]`, float32 (Stable Diffusion 3, 2403.03206)."""
    drawn = [make_generator(seed, step, place.prompt, place.clip, "time").standard_normal() for place in places]
    u = torch.sigmoid(torch.tensor(drawn, dtype=torch.float64))
    return (shift * u / (1 + (shift - 1) * u)).float()


def compute_clip_losses(maker: ClipMaker, batch: ClipMicroBatch, step: int) -> Tensor:
    """Return each clip's velocity error at a random noise level: `[B]`."""
    config, batch = maker.config, batch.to(maker.device)
    times = draw_times(batch.places, config.world.shift, config.train.seed, step).to(maker.device)
    s = times.view(-1, 1, 1, 1, 1)
    assert batch.clean is not None
    v = build_velocity(maker, batch, 1.0)((1 - s) * batch.clean + s * batch.start, times)
    return compute_flow_matching_loss(v, batch.clean, batch.start, batch.free)


def accumulate_gradients(
    maker: ClipMaker, engine: DeepSpeedEngine, batches: Sequence[ClipMicroBatch], *, step: int, world: World
) -> dict[str, float]:
    """Run the forward and backward passes for every clip, to accumulate the step's gradient; return the metrics."""
    num_clips = count_clips(batches, maker.share)
    sums: dict[str, float] = {}
    for i, batch in enumerate(batches):  # forward passes are collective; all ranks run the same number of them
        with record_phase("forward"):
            loss = compute_clip_losses(maker, batch, step).sum() * (float(batch.counted) / num_clips)
        add_gradient(engine, loss, world.size, last=i == len(batches) - 1)
        add_values(sums, {"train/loss": loss.item()})
    return sum_over_ranks(sums, maker.share)


@torch.no_grad()
def measure_held_out_loss(maker: ClipMaker, validation: WorldDataset) -> float | None:
    """Return the mean loss on the held-out clips, or None if all of them are unusable. Collective.

    Noise and noise levels are the same in every call.
    """
    rows = list_loss_rows(maker.config, validation)
    local_rows = [rows[place.prompt] for place in list_local_places(len(rows), maker.share)]
    with share_errors():
        clips = read_clips(validation, maker.inputs.size, local_rows)
    batches, skipped = make_batches(maker, validation, rows, clips, step=0)
    if not batches:
        log.warning(
            "the validation loss is not measured, because none of the %d held-out clips can be used; first error: %s",
            len(rows),
            skipped[0],
        )
        return None
    sums: dict[str, float] = {"loss": 0.0, "clips": 0.0}
    for batch in batches:
        losses = compute_clip_losses(maker, batch, step=0)
        if batch.counted:
            add_values(sums, {"loss": float(losses.double().sum()), "clips": float(len(batch))})
    total = sum_over_ranks(sums, maker.share)
    return total["loss"] / total["clips"]
