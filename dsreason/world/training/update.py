"""The gradients of Flow-GRPO and DDRL: log-probabilities of sampled steps → ratios → policy loss, KL and data term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsreason.engine.engine import add_gradient
from dsreason.errors import DsReasonError
from dsreason.job.ranks import gather_objects
from dsreason.phases import record_phase
from dsreason.world.losses import flow_matching_loss, kl_mean, kl_velocity, policy_loss
from dsreason.world.sampler import Velocity
from dsreason.world.schema import WorldConfigSection
from dsreason.world.steps import Step, log_prob, mean
from dsreason.world.training.build import WorldRun
from dsreason.world.training.clips import MicroBatch, Sample, clip_noise, halved
from dsreason.world.training.gradients import add, count_clips, gathered
from dsreason.world.training.rollout import Plan, plan_steps
from dsreason.world.training.velocity import velocity_of

MAX_RATIO_ERROR = 1e-4
"""How far from 1 a ratio of the first update may be: sampling and training with the same weights are one function."""
DATA_COEF = 0.01


@torch.no_grad()
def with_reference(world: WorldRun, parts: Sequence[Sequence[Sample]], step: int) -> list[list[Sample]]:
    """The samples with the reference's velocities of their trained steps, where there is a KL. Collective."""
    if world.reference is None:
        return [list(part) for part in parts]
    plan = plan_steps(world, step)
    with world.reference.in_place():
        return [[with_reference_of(world, one, plan) for one in part] for part in parts]


def with_reference_of(world: WorldRun, one: Sample, plan: Plan) -> Sample:
    velocity = velocity_of(world, one.batch.to(world.device), world.config.world.guidance_scale)
    found = {
        number: halved(at(velocity, kept.x.to(world.device), world, number)).cpu()
        for number, kept in one.trajectory.items()
    }
    return replace(one, fixed={**one.fixed, "reference": found})


def at(velocity: Velocity, x: Tensor, world: WorldRun, number: int) -> Tensor:
    """The velocity at the beginning of a step, as sampling asked for it."""
    return velocity(x, x.new_full((len(x),), float(world.sigmas[number])))


def accumulate(world: WorldRun, part: Sequence[Sample], step: int, rollout_step: int) -> dict[str, float]:
    """Forward and backward of every clip at every trained step; the gradient is that of the whole optimizer step.

    Args:
        step: the optimizer step, which the rollout began at or before.

    Raises:
        DsReasonError: the first update of this process finds other log-probabilities than sampling did.
    """
    config = world.config.world
    plan = plan_steps(world, rollout_step)
    num_clips = count_clips(world, part)
    coefficient = DATA_COEF if config.data_coef is None else config.data_coef
    data_steps = [number for number in plan.trained if with_data(config, plan, number)]
    sums: dict[str, float] = {}
    worst = 0.0
    items = [(one, number) for one in part for number in plan.trained]
    for i, (one, number) in enumerate(items):  # every rank runs the same number: forwards are collectives
        last, counted = i == len(items) - 1, float(one.batch.counted) / num_clips
        with record_phase("forward"):
            loss, found, error = step_loss(world, one, number, plan.steps[number])
        share = counted / len(plan.trained)
        total = loss.sum() * share
        add_gradient(world.engine, total, world.world.size, last=last and number not in data_steps)
        add(sums, {"train/loss": total.item()} | {name: float(v.sum()) * share for name, v in found.items()})
        worst = max(worst, error if one.batch.counted else 0.0)
        if number in data_steps:
            with record_phase("forward"):
                data = data_loss(world, one.batch, number, rollout_step).sum() * (counted / len(data_steps))
            add_gradient(world.engine, coefficient * data, world.world.size, last=last)
            add(sums, {"train/loss": coefficient * data.item(), "policy/data_loss": data.item()})
    metrics = gathered(world, sums)
    metrics["policy/ratio_error"] = max(gather_objects(worst))
    if step == rollout_step:
        check_ratio(world, metrics["policy/ratio_error"])
    return metrics


def step_loss(world: WorldRun, one: Sample, number: int, step: Step) -> tuple[Tensor, dict[str, Tensor], float]:
    """The loss of each clip at one trained step, `[B]`; what is shown, `[B]`; and the largest distance of a ratio from 1."""
    config, batch, kept = world.config.world, one.batch.to(world.device), one.trajectory[number]
    x, x_next = kept.x.to(world.device), kept.x_next.to(world.device)
    v = at(velocity_of(world, batch, config.guidance_scale), x, world, number)
    expected = mean(step, x, v)
    new, old = log_prob(x_next, expected, step.std, batch.free), kept.log_prob.to(world.device)
    result = policy_loss(new, old, one.advantages.to(world.device), config.clip_range)
    loss = result.loss
    found = {"policy/clip_fraction": result.clipped, "policy/loss": result.loss.detach()}
    if "reference" in one.fixed:
        reference = one.fixed["reference"][number].to(world.device, torch.float32)
        if config.kl == "velocity":
            kl = kl_velocity(v, reference, batch.free)
        else:
            kl = kl_mean(expected, mean(step, x, reference), step.std, batch.free)
        loss = loss + config.kl_coef * kl
        found["policy/kl"] = kl.detach()
    return loss, found, float((result.ratio - 1).abs().max())


def with_data(config: WorldConfigSection, plan: Plan, number: int) -> bool:
    """Whether DDRL's data term belongs to this trained step."""
    return config.algorithm == "ddrl" and (config.data_steps == "all" or number == plan.trained[0])


def data_loss(world: WorldRun, batch: MicroBatch, number: int, rollout_step: int) -> Tensor:
    """DDRL's data term (2512.04332): the velocity's error on the rows' own clips, at the noise level of a trained step. `[B]`."""
    config, here = world.config, batch.to(world.device)
    clean, noise = here.clean, here.start
    assert clean is not None
    if config.world.data_noise == "fresh":
        seed, purpose = config.train.seed, f"data {number}"
        noise = clip_noise(batch.places, world.shape, seed, rollout_step, purpose).to(world.device)
    s = float(world.sigmas[number])
    here = replace(here, start=noise)
    v = at(velocity_of(world, here, 1.0), (1 - s) * clean + s * noise, world, number)
    return flow_matching_loss(v, clean, noise, here.free)


def check_ratio(world: WorldRun, error: float) -> None:
    """DsReasonError, on every rank, where the first update of this process is not on policy."""
    if world.checked:
        return
    world.checked = True
    if error > MAX_RATIO_ERROR:
        raise DsReasonError(
            f"step {world.state.step + 1}: the log-probabilities of the first update differ from those of sampling: a ratio "
            f"is {error:.2g} away from 1, more than {MAX_RATIO_ERROR:g}, although the weights are the same. Sampling and "
            'training compute different things; try train.precision = "fp32", or model.gradient_checkpointing = false'
        )
