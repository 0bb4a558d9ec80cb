"""Gradients for Flow-GRPO and DDRL: log-probabilities of sampled steps → ratios → policy loss, KL term and data term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.engine.engine import add_gradient
from dsreason.engine.reference import ReferencePolicy
from dsreason.errors import DsReasonError
from dsreason.job.ranks import World, gather_objects
from dsreason.phases import record_phase
from dsreason.world.losses import compute_flow_matching_loss, compute_kl_mean, compute_kl_velocity, compute_policy_loss
from dsreason.world.sampler import Velocity
from dsreason.world.schema import WorldConfigSection
from dsreason.world.steps import Step, compute_mean, log_prob
from dsreason.world.training.clips import ClipMicroBatch, SampledClips, draw_clip_noise, to_lossless_bfloat16
from dsreason.world.training.gradients import add_values, count_clips, sum_over_ranks
from dsreason.world.training.rollout import SamplingPlan, plan_steps
from dsreason.world.training.velocity import ClipMaker, build_velocity

MAX_RATIO_ERROR = 1e-4
"""Maximum distance of a ratio from 1 in the first update, where sampling and training use the same weights."""
DATA_COEF = 0.01


@torch.no_grad()
def add_reference(
    maker: ClipMaker, reference: ReferencePolicy | None, parts: Sequence[Sequence[SampledClips]]
) -> list[list[SampledClips]]:
    """Return the samples; if there is a KL term, add the reference's velocities at the trained steps. Collective."""
    if reference is None:
        return [list(part) for part in parts]
    with reference.in_place():
        return [[add_reference_velocities(maker, sample) for sample in part] for part in parts]


def add_reference_velocities(maker: ClipMaker, sample: SampledClips) -> SampledClips:
    """Return the sample with the reference's velocities; the transformer must hold the reference's weights."""
    velocity = build_velocity(maker, sample.batch.to(maker.device), maker.config.world.guidance_scale)
    velocities = {
        number: to_lossless_bfloat16(
            evaluate_velocity(velocity, kept_step.x.to(maker.device), maker.sigmas[number])
        ).cpu()
        for number, kept_step in sample.trajectory.items()
    }
    return replace(sample, fixed={**sample.fixed, "reference": velocities})


def evaluate_velocity(velocity: Velocity, x: Tensor, level: Tensor) -> Tensor:
    """Return the velocity at the start of a step, computed as in sampling; `level` is that step's noise level, a scalar."""
    return velocity(x, x.new_full((len(x),), float(level)))


def accumulate_gradients(
    maker: ClipMaker, engine: DeepSpeedEngine, samples: Sequence[SampledClips], *, rollout_step: int, world: World
) -> dict[str, float]:
    """Run the forward and backward passes for every clip and trained step, to accumulate the optimizer step's gradient.

    Args:
        rollout_step: first optimizer step of the rollout.

    Returns:
        The step's metrics.
    """
    config = maker.config.world
    plan = plan_steps(maker.config, maker.sigmas, rollout_step)
    num_clips = count_clips([sample.batch for sample in samples], maker.share)
    coefficient = DATA_COEF if config.data_coef is None else config.data_coef
    data_steps = [number for number in plan.trained if has_data_term(config, plan, number)]
    sums: dict[str, float] = {}
    worst = 0.0
    items = [(sample, number) for sample in samples for number in plan.trained]
    for i, (sample, number) in enumerate(items):  # forward passes are collective; all ranks run the same number of them
        last, counted = i == len(items) - 1, float(sample.batch.counted) / num_clips
        with record_phase("forward"):
            loss, metrics, error = compute_loss(maker, sample, number, plan.steps[number])
        share = counted / len(plan.trained)
        total = loss.sum() * share
        add_gradient(engine, total, world.size, last=last and number not in data_steps)
        add_values(sums, {"train/loss": total.item()} | {name: float(v.sum()) * share for name, v in metrics.items()})
        worst = max(worst, error if sample.batch.counted else 0.0)
        if number in data_steps:
            with record_phase("forward"):
                data = compute_data_loss(maker, sample.batch, number, rollout_step).sum() * (counted / len(data_steps))
            add_gradient(engine, coefficient * data, world.size, last=last)
            add_values(sums, {"train/loss": coefficient * data.item(), "policy/data_loss": data.item()})
    totals = sum_over_ranks(sums, maker.share)
    totals["policy/ratio_error"] = max(gather_objects(worst))
    return totals


def compute_loss(
    maker: ClipMaker, sample: SampledClips, number: int, step: Step
) -> tuple[Tensor, dict[str, Tensor], float]:
    """Return each clip's loss and metrics at a trained step (`[B]` each), and the largest distance of a ratio from 1."""
    config, device = maker.config.world, maker.device
    batch, kept_step = sample.batch.to(device), sample.trajectory[number]
    x, x_next = kept_step.x.to(device), kept_step.x_next.to(device)
    v = evaluate_velocity(build_velocity(maker, batch, config.guidance_scale), x, maker.sigmas[number])
    expected = compute_mean(step, x, v)
    new, old = log_prob(x_next, expected, step.std, batch.free), kept_step.log_prob.to(device)
    result = compute_policy_loss(new, old, sample.advantages.to(device), config.clip_range)
    loss = result.loss
    metrics = {"policy/clip_fraction": result.clipped, "policy/loss": result.loss.detach()}
    if "reference" in sample.fixed:
        reference = sample.fixed["reference"][number].to(device, torch.float32)
        if config.kl == "velocity":
            kl = compute_kl_velocity(v, reference, batch.free)
        else:
            kl = compute_kl_mean(expected, compute_mean(step, x, reference), step.std, batch.free)
        loss = loss + config.kl_coef * kl
        metrics["policy/kl"] = kl.detach()
    return loss, metrics, float((result.ratio - 1).abs().max())


def has_data_term(config: WorldConfigSection, plan: SamplingPlan, number: int) -> bool:
    """Return whether trained step `number` includes DDRL's data term."""
    return config.algorithm == "ddrl" and (config.data_steps == "all" or number == plan.trained[0])


def compute_data_loss(maker: ClipMaker, batch: ClipMicroBatch, number: int, rollout_step: int) -> Tensor:
    """Return DDRL's data term (2512.04332), `[B]`: the velocity error on the rows' real clips at step `number`'s noise level."""
    config, batch = maker.config, batch.to(maker.device)
    clean, noise = batch.clean, batch.start
    assert clean is not None
    if config.world.data_noise == "fresh":
        seed, purpose = config.train.seed, f"data {number}"
        noise = draw_clip_noise(batch.places, maker.inputs.shape, seed, rollout_step, purpose).to(maker.device)
    s = float(maker.sigmas[number])
    batch = replace(batch, start=noise)
    v = evaluate_velocity(build_velocity(maker, batch, 1.0), (1 - s) * clean + s * noise, maker.sigmas[number])
    return compute_flow_matching_loss(v, clean, noise, batch.free)


@dataclass
class RatioCheck:
    """A check that this process's first update is on-policy; later updates may be off-policy."""

    is_done: bool = False

    def check(self, error: float, step: int) -> None:
        """Raise DsReasonError on every rank if `error` is too large in the first call; ignore later calls.

        Args:
            error: largest distance of a ratio from 1, across all ranks.
        """
        if self.is_done:
            return
        self.is_done = True
        if error > MAX_RATIO_ERROR:
            raise DsReasonError(
                f"step {step}: the log-probabilities of the first update differ from those of sampling, although the weights "
                f"are the same: a ratio differs from 1 by {error:.2g}, but at most {MAX_RATIO_ERROR:g} is allowed; try "
                'train.precision = "fp32", or model.gradient_checkpointing = false'
            )
