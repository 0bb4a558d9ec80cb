"""Rollouts: prompts → sampled clips → rewards → advantages. Rewards are computed while more clips are sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsreason.engine.average import WeightAverage
from dsreason.errors import DsReasonError, RewardError
from dsreason.job.ranks import gather_objects, share_errors
from dsreason.job.watchdog import Watchdog
from dsreason.monitor.memory import MemoryLedger
from dsreason.world.data import WorldDataset
from dsreason.world.latents import LatentCodec
from dsreason.world.losses import compute_exponential, compute_group_advantages, find_equal_groups
from dsreason.world.noise import draw_window
from dsreason.world.rewards.scorer import ClipScores, Pending
from dsreason.world.sampler import Kept
from dsreason.world.sampler import sample as sample_latents
from dsreason.world.schema import WorldConfig, WorldConfigSection
from dsreason.world.steps import Step, build_step
from dsreason.world.training.clips import ClipIndex, ClipMicroBatch, SampledClips, draw_clip_noise, group_local_clips
from dsreason.world.training.nft import add_old_velocities
from dsreason.world.training.preflight import list_trained_steps
from dsreason.world.training.show import Look, average_looks, look_at
from dsreason.world.training.velocity import ClipMaker, build_velocity, restore_given_frames


@dataclass(frozen=True)
class SamplingPlan:
    """The steps of a rollout's sampler."""

    steps: tuple[Step, ...]
    trained: tuple[int, ...]
    """Numbers of the trained steps, which add noise."""


@dataclass(frozen=True)
class PendingBatch:
    """A sampled micro-batch whose rewards are being computed."""

    batch: ClipMicroBatch
    result: Callable[[], ClipScores]
    """Waits for the scores and returns them."""
    looks: list[Look]


@dataclass(frozen=True)
class ScoredClip:
    """A clip's reward and visual metrics, small enough for every rank to gather them for all clips."""

    place: ClipIndex
    total: float
    by_name: dict[str, float]
    look: Look


def sample_rollout(
    maker: ClipMaker,
    dataset: WorldDataset,
    indices: Sequence[int],
    *,
    step: int,
    old: WeightAverage | None,
    watchdog: Watchdog,
    memory: MemoryLedger,
) -> tuple[list[list[SampledClips]], dict[str, float]]:
    """Sample and score clips for the prompts in the rows `indices`. Collective.

    A clip depends on the seed, the step, its prompt and its number in the group, but not on the number of ranks.

    Args:
        step: first optimizer step of the rollout.
        old: weights to sample with; None samples with the policy.

    Returns:
        This rank's samples, one list per optimizer step, and the metrics of the rollout.
    """
    config = maker.config
    plan = plan_steps(config, maker.sigmas, step)
    parts = []
    with watchdog.track_phase("data"), share_errors():
        for places in split_places(config.world):
            groups = group_local_clips(places, maker.share, config.train.micro_batch_size)
            with_clean = config.world.algorithm == "ddrl"
            parts.append(maker.inputs.build_micro_batches(groups, dataset, indices, step, with_clean=with_clean))
    started = time.perf_counter()
    pending: list[PendingBatch] = []
    with memory.track_phase("rollout"), nullcontext() if old is None else old.in_place():
        samples = [[sample_batch(maker, batch, plan, step, pending) for batch in part] for part in parts]
        if old is not None:
            samples = [[add_old_velocities(maker, sample, step) for sample in part] for part in samples]
    sampled = time.perf_counter()
    with watchdog.track_phase("reward"):
        scored = collect_scores(pending)
    metrics = {
        "time/generate": sampled - started,
        "time/reward": time.perf_counter() - sampled,
        **summarise(config.world, scored),
    }
    return add_advantages(config.world, samples, scored), metrics


def split_places(config: WorldConfigSection) -> list[list[ClipIndex]]:
    """Split the rollout's clips among its optimizer steps; each step gets a share of the prompts and all of their clips."""
    parts = config.optimizer_steps_per_rollout
    bounds = [part * config.prompts_per_step // parts for part in range(parts + 1)]
    return [
        [ClipIndex(prompt, clip) for prompt in range(begin, end) for clip in range(config.num_generations)]
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]


def plan_steps(config: WorldConfig, sigmas: Tensor, step: int) -> SamplingPlan:
    """Plan the rollout's sampling steps: trained steps add noise, and the other steps follow the ODE.

    Args:
        step: first optimizer step of the rollout.
    """
    world, levels = config.world, [float(s) for s in sigmas]
    pairs = list(zip(levels, levels[1:], strict=False))
    trained: Sequence[int] = ()
    if world.algorithm != "nft":
        trained = list_trained_steps(config, levels)
        if world.window:
            trained = draw_window(world.window, len(pairs), seed=config.train.seed, step=step)
        elif world.trained_steps is not None:
            trained = sorted(set(world.trained_steps))
    steps = [
        build_step(world.sde, s, s_next, world.noise_level, s_cap=levels[1])
        if number in trained
        else build_step("ode", s, s_next)
        for number, (s, s_next) in enumerate(pairs)
    ]
    return SamplingPlan(tuple(steps), tuple(trained))


def sample_batch(
    maker: ClipMaker, batch: ClipMicroBatch, plan: SamplingPlan, step: int, pending: list[PendingBatch]
) -> SampledClips:
    """Sample a micro-batch's clips, start scoring them, and append the pending scores to `pending`.

    The result's advantages are zero until the rewards arrive.
    """
    config, on_device = maker.config, batch.to(maker.device)

    def draw_noise(number: int) -> Tensor:
        seed, purpose = config.train.seed, f"sampling step {number}"
        return draw_clip_noise(batch.places, maker.inputs.shape, seed, step, purpose).to(maker.device)

    velocity = build_velocity(maker, on_device, config.world.guidance_scale)
    sampled = sample_latents(
        velocity, on_device.start, maker.sigmas, plan.steps, draw_noise, set(plan.trained), free=on_device.free
    )
    latents = restore_given_frames(sampled.latents, on_device)
    if batch.counted and maker.share.leads:
        pending.append(start_scoring(maker, batch, latents))
    trajectory = {
        number: Kept(kept_step.x.cpu(), kept_step.x_next.cpu(), kept_step.log_prob.cpu())
        for number, kept_step in sampled.trajectory.items()
    }
    return SampledClips(batch, latents.cpu(), trajectory, torch.zeros(len(batch)), {})


def decode_pixels(codec: LatentCodec, latents: Tensor) -> Tensor:
    """Decode latents to uint8 pixels `[B, 3, T, H, W]`, on the autoencoder's device."""
    return (codec.decode(latents) * 255).round().to(torch.uint8)


def start_scoring(maker: ClipMaker, batch: ClipMicroBatch, latents: Tensor) -> PendingBatch:
    """Start scoring the clips, and measure how they look.

    Errors are raised only when the result is requested; otherwise the other ranks would hang in the next forward pass.
    """
    assert maker.scorer is not None
    clips = decode_pixels(maker.codec, latents)
    batch_looks = look_at(clips)  # while the clips are on the GPU; on the CPU, a large clip would take seconds
    try:
        pending: Pending = maker.scorer.start(clips.cpu(), latents.cpu(), batch.rows, maker.inputs.size.fps)
    except DsReasonError as error:
        return PendingBatch(batch, raise_later(error), batch_looks)
    return PendingBatch(batch, pending.result, batch_looks)


def raise_later(error: DsReasonError) -> Callable[[], ClipScores]:
    def result() -> ClipScores:
        raise error

    return result


def collect_scores(pending: Sequence[PendingBatch]) -> list[ScoredClip]:
    """Return the rewards of all ranks' clips, sorted by prompt and number in the group. Collective.

    Raises:
        RewardError: a reward failed or is not finite; the error is raised on every rank.
    """
    local: list[ScoredClip] = []
    with share_errors():
        for item in pending:
            scores, batch = item.result(), item.batch
            if not torch.isfinite(scores.total).all():
                raise RewardError(
                    f"the rewards of {batch.rows[0].id} and the clips after it must be finite; got {scores.total.tolist()}"
                )
            for i, place in enumerate(batch.places):
                by_name = {name: float(v[i]) for name, v in scores.by_name.items()}
                local.append(ScoredClip(place, float(scores.total[i]), by_name, item.looks[i]))
    return sorted((clip for part in gather_objects(local) for clip in part), key=lambda clip: clip.place)


def build_reward_table(config: WorldConfigSection, scored: Sequence[ScoredClip]) -> Tensor:
    """Return the rewards as a table of prompts and clips: `[P, G]`, float64."""
    values = torch.tensor([clip.total for clip in scored], dtype=torch.float64)
    return values.view(config.prompts_per_step, config.num_generations)


def add_advantages(
    config: WorldConfigSection, samples: Sequence[Sequence[SampledClips]], scored: Sequence[ScoredClip]
) -> list[list[SampledClips]]:
    """Return the samples with their advantages, which are computed from the rewards of all ranks' clips."""
    table = compute_group_advantages(
        build_reward_table(config, scored), std=config.advantage_std, clip=config.advantage_clip
    )
    if config.algorithm == "ddrl" and config.exponential_advantages:
        table = compute_exponential(table)

    def add(sample: SampledClips) -> SampledClips:
        values = [float(table[place.prompt, place.clip]) for place in sample.batch.places]
        return replace(sample, advantages=torch.tensor(values, dtype=torch.float32))

    return [[add(sample) for sample in part] for part in samples]


def summarise(config: WorldConfigSection, scored: Sequence[ScoredClip]) -> dict[str, float]:
    """Return a rollout's metrics: the rewards by name, and measures of how the clips look, which reveal reward hacking."""
    table, size = build_reward_table(config, scored), config.num_generations
    metrics = {
        "reward/mean": float(table.mean()),
        "reward/std": float(table.std(dim=1).mean()),
        "reward/zero_std_fraction": float(find_equal_groups(table).double().mean()),
    }
    for name in scored[0].by_name:
        metrics[f"reward/{name}/mean"] = sum(clip.by_name[name] for clip in scored) / len(scored)
    groups = [[clip.look for clip in scored[i : i + size]] for i in range(0, len(scored), size)]
    return metrics | average_looks(groups, "clips")
