"""Supervised training on real clips by flow matching (rectified flow, 2209.03003)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from dsreason.engine.engine import add_gradient
from dsreason.errors import DataError
from dsreason.job.ranks import errors_on_all_ranks, gather_objects
from dsreason.phases import record_phase
from dsreason.train.common.steps import count_skipped
from dsreason.world.data import WorldDataset
from dsreason.world.losses import flow_matching_loss
from dsreason.world.noise import generator
from dsreason.world.training.build import WorldRun
from dsreason.world.training.clips import MicroBatch, Place, own_places, share_out
from dsreason.world.training.gradients import add, gathered
from dsreason.world.training.inputs import Clip, loss_rows, read_clips
from dsreason.world.training.velocity import velocity_of

log = logging.getLogger(__name__)


def next_batches(world: WorldRun) -> list[MicroBatch]:
    """This rank's clips of the next step; with `data.on_bad_row = "skip"` those that cannot be read are left out."""
    step, indices = world.state.step, world.order.indices(world.state.step)
    with errors_on_all_ranks():
        clips = next(world.clips)
    batches, skipped = make_batches(world, world.training, indices, clips, step + 1)
    if not batches:
        raise DataError(f"none of the {len(indices)} clips of step {step + 1} can be used; the first: {skipped[0]}")
    count_skipped(world, skipped)
    return batches


def make_batches(
    world: WorldRun, dataset: WorldDataset, indices: Sequence[int], clips: Sequence[Clip], step: int
) -> tuple[list[MicroBatch], list[str]]:
    """The clips of this rank's share of the rows, as many micro-batches on every rank; and the rows, of all ranks, that are
    left out. There are no batches where no rank has a clip that can be used. Collective.

    Args:
        clips: of this rank's places, see `own_places`.
    """
    clean: dict[Place, Tensor] = {}
    bad: list[str] = []
    with errors_on_all_ranks():
        for place, clip in zip(own_places(len(indices), world.share), clips, strict=True):
            if not isinstance(clip, DataError):
                clean[place] = world.inputs.latents.encode(clip[None])[0]
            elif world.config.data.on_bad_row == "error":
                raise clip
            else:
                bad.append(str(clip))
    found = gather_objects((len(clean), bad) if world.share.leads else (0, []))
    skipped = [text for _, texts in found for text in texts]
    if sum(count for count, _ in found) == 0:
        return [], skipped
    groups = share_out(
        [Place(number, 0) for number in range(len(indices))], world.share, world.config.train.micro_batch_size
    )
    batches = []
    with errors_on_all_ranks():
        for group, counted in groups:
            places = tuple(place for place in group if place in clean) if counted else ()
            batches.append(world.inputs.real_batch(places or group[:1], bool(places), clean, dataset, indices, step))
    return batches, skipped


def draw_times(places: Sequence[Place], shift: float, seed: int, step: int) -> Tensor:
    """`[B]`, float32: s = shift u / (1 + (shift - 1) u) with logit-normal u (Stable Diffusion 3, 2403.03206)."""
    drawn = [generator(seed, step, place.prompt, place.clip, "time").standard_normal() for place in places]
    u = torch.sigmoid(torch.tensor(drawn, dtype=torch.float64))
    return (shift * u / (1 + (shift - 1) * u)).float()


def clip_losses(world: WorldRun, batch: MicroBatch, step: int) -> Tensor:
    """The velocity's error on each clip, at a noise level drawn for it: `[B]`."""
    config, here = world.config, batch.to(world.device)
    times = draw_times(batch.places, config.world.shift, config.train.seed, step).to(world.device)
    s = times.view(-1, 1, 1, 1, 1)
    assert here.clean is not None
    v = velocity_of(world, here, 1.0)((1 - s) * here.clean + s * here.start, times)
    return flow_matching_loss(v, here.clean, here.start, here.free)


def accumulate(world: WorldRun, batches: Sequence[MicroBatch], step: int) -> dict[str, float]:
    """Forward and backward of every clip; the gradient is that of the whole optimizer step."""
    own = sum(len(batch) for batch in batches if batch.counted and world.share.leads)
    num_clips = sum(gather_objects(own))
    sums: dict[str, float] = {}
    for i, batch in enumerate(batches):  # every rank runs the same number: forwards are collectives
        with record_phase("forward"):
            loss = clip_losses(world, batch, step).sum() * (float(batch.counted) / num_clips)
        add_gradient(world.engine, loss, world.world.size, last=i == len(batches) - 1)
        add(sums, {"train/loss": loss.item()})
    return gathered(world, sums)


@torch.no_grad()
def held_out_loss(world: WorldRun) -> float | None:
    """The mean loss on the held-out clips, with noise and noise levels that never change; None where none of them can be
    used. Collective."""
    rows = loss_rows(world.config, world.validation)
    own = [rows[place.prompt] for place in own_places(len(rows), world.share)]
    with errors_on_all_ranks():
        clips = read_clips(world.validation, world.size, own)
    batches, skipped = make_batches(world, world.validation, rows, clips, step=0)
    if not batches:
        log.warning("there is no validation loss: none of the %d held-out clips can be used: %s", len(rows), skipped[0])
        return None
    sums: dict[str, float] = {"loss": 0.0, "clips": 0.0}
    for batch in batches:
        losses = clip_losses(world, batch, step=0)
        if batch.counted:
            add(sums, {"loss": float(losses.double().sum()), "clips": float(len(batch))})
    total = gathered(world, sums)
    return total["loss"] / total["clips"]
