"""Supervised training on real clips by flow matching (rectified flow, 2209.03003)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.job.ranks import errors_on_all_ranks, gather_objects
from dsreason.losses.diffusion import flow_matching_loss
from dsreason.train.common.steps import count_skipped
from dsreason.train.world.build import WorldRun
from dsreason.train.world.clips import MicroBatch, Place, own_places, share_out
from dsreason.train.world.gradients import add, backward, gathered
from dsreason.train.world.inputs import Clip, loss_rows, read_clips
from dsreason.train.world.velocity import velocity_of
from dsreason.world.data import WorldDataset
from dsreason.world.noise import generator


def next_batches(world: WorldRun) -> list[MicroBatch]:
    """This rank's clips of the next step; with `data.on_bad_row = "skip"` those that cannot be read are left out."""
    step = world.state.step
    batches, skipped = make_batches(world, world.training, world.order.indices(step), next(world.clips), step + 1)
    count_skipped(world, skipped)
    return batches


def make_batches(
    world: WorldRun, dataset: WorldDataset, indices: Sequence[int], clips: Sequence[Clip], step: int
) -> tuple[list[MicroBatch], list[str]]:
    """The clips of this rank's share of the rows, as many micro-batches on every rank; and the rows, of all ranks, that are
    left out. Collective.

    Args:
        clips: of this rank's places, see `own_places`.
    """
    config = world.config
    own = dict(zip(own_places(len(indices), world.share), clips, strict=True))
    bad = [clip for clip in own.values() if isinstance(clip, DataError)]
    with errors_on_all_ranks():
        if bad and config.data.on_bad_row == "error":
            raise bad[0]
    usable = {place: clip for place, clip in own.items() if not isinstance(clip, DataError)}
    clean = {place: world.inputs.latents.encode(clip[None])[0] for place, clip in usable.items()}
    found = gather_objects((len(clean), [str(error) for error in bad]) if world.share.leads else (0, []))
    if sum(count for count, _ in found) == 0:
        raise DataError(f"none of the {len(indices)} clips of a step can be used; the first: {found[0][1][0]}")
    groups = share_out([Place(number, 0) for number in range(len(indices))], world.share, config.train.micro_batch_size)
    batches = []
    for group, counted in groups:
        places = tuple(place for place in group if place in clean) if counted else ()
        batches.append(world.inputs.real_batch(places or group[:1], bool(places), clean, dataset, indices, step))
    return batches, [text for _, texts in found for text in texts]


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
        loss = clip_losses(world, batch, step).sum() * (float(batch.counted) / num_clips)
        backward(world, loss, last=i == len(batches) - 1)
        add(sums, {"train/loss": loss.item()})
    return gathered(world, sums)


@torch.no_grad()
def held_out_loss(world: WorldRun) -> float:
    """The mean loss on the held-out clips, with noise and noise levels that never change. Collective."""
    rows = loss_rows(world.config, world.validation)
    own = [rows[place.prompt] for place in own_places(len(rows), world.share)]
    clips = read_clips(world.validation, world.size, own)
    batches, _ = make_batches(world, world.validation, rows, clips, step=0)
    sums: dict[str, float] = {"loss": 0.0, "clips": 0.0}
    for batch in batches:
        losses = clip_losses(world, batch, step=0)
        if batch.counted:
            add(sums, {"loss": float(losses.double().sum()), "clips": float(len(batch))})
    total = gathered(world, sums)
    return total["loss"] / total["clips"]
