"""One rollout: prompts → sampled clips → rewards, which are made while further clips are sampled → advantages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsreason.errors import DsReasonError, RewardError
from dsreason.job.ranks import errors_on_all_ranks, gather_objects
from dsreason.world.losses import equal_groups, exponential, group_advantages
from dsreason.world.noise import window
from dsreason.world.rewards import Pending, Scores
from dsreason.world.sampler import Kept
from dsreason.world.sampler import sample as sample_latents
from dsreason.world.steps import Step, step_of
from dsreason.world.training.build import WorldRun
from dsreason.world.training.clips import MicroBatch, Place, Sample, clip_noise, share_out
from dsreason.world.training.nft import with_old_velocities
from dsreason.world.training.preflight import trained_steps
from dsreason.world.training.show import Look, look_at, looks
from dsreason.world.training.velocity import ClipMaker, velocity_of, with_given


@dataclass(frozen=True)
class Plan:
    """What happens in the steps of a rollout."""

    steps: tuple[Step, ...]
    trained: tuple[int, ...]
    """Numbers of those that add noise and are trained."""


@dataclass(frozen=True)
class Scored:
    """One clip's reward and what it looks like; small, so that all ranks can have those of all clips."""

    place: Place
    total: float
    by_name: dict[str, float]
    look: Look


def rollout(world: WorldRun) -> list[list[Sample]]:
    """Sampled and scored clips of the next prompts, this rank's share: a list for each optimizer step.

    The same seed, step, prompt and number in the group give the same clip on any number of ranks.
    """
    config, step = world.config, world.state.step + 1
    number = world.state.step // config.world.optimizer_steps_per_rollout
    plan, indices = plan_steps(world, step), world.order.indices(number)
    parts = []
    with world.watchdog.phase("data"), errors_on_all_ranks():
        for places in split_places(world):
            groups = share_out(places, world.share, config.train.micro_batch_size)
            with_clean = config.world.algorithm == "ddrl"
            parts.append(world.inputs.micro_batches(groups, world.training, indices, step, with_clean=with_clean))
    started = time.perf_counter()
    old = world.averages.get("old")
    pending: list[tuple[MicroBatch, Callable[[], Scores], list[Look]]] = []
    with world.memory.phase("rollout"), nullcontext() if old is None else old.in_place():
        samples = [[sample(world, batch, plan, step, pending) for batch in part] for part in parts]
        if old is not None:
            samples = [[with_old_velocities(world, one, step) for one in part] for part in samples]
    sampled = time.perf_counter()
    with world.watchdog.phase("reward"):
        scored = fetch(pending)
    world.rollout_metrics = {
        "time/generate": sampled - started,
        "time/reward": time.perf_counter() - sampled,
        **summarise(world, scored),
    }
    return with_advantages(world, samples, scored)


def split_places(world: WorldRun) -> list[list[Place]]:
    """The rollout's clips by optimizer step, each with its share of the prompts."""
    config = world.config.world
    parts = config.optimizer_steps_per_rollout
    bounds = [part * config.prompts_per_step // parts for part in range(parts + 1)]
    return [
        [Place(prompt, clip) for prompt in range(begin, end) for clip in range(config.num_generations)]
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]


def plan_steps(world: WorldRun, step: int) -> Plan:
    """The rollout's steps: noisy where they are trained, along the ODE elsewhere."""
    config, levels = world.config.world, [float(s) for s in world.sigmas]
    pairs = list(zip(levels, levels[1:], strict=False))
    trained: Sequence[int] = ()
    if config.algorithm != "nft":
        trained = trained_steps(world.config, levels)
        if config.window:
            trained = window(config.window, len(pairs), seed=world.config.train.seed, step=step)
        elif config.trained_steps is not None:
            trained = sorted(set(config.trained_steps))
    steps = [
        step_of(config.sde, s, s_next, config.noise_level, s_cap=levels[1])
        if number in trained
        else step_of("ode", s, s_next)
        for number, (s, s_next) in enumerate(pairs)
    ]
    return Plan(tuple(steps), tuple(trained))


def sample(
    world: WorldRun,
    batch: MicroBatch,
    plan: Plan,
    step: int,
    pending: list[tuple[MicroBatch, Callable[[], Scores], list[Look]]],
) -> Sample:
    """The clips of a micro-batch; asking for their rewards begins, and is noted in `pending`."""
    config, here = world.config, batch.to(world.device)

    def noise_of(number: int) -> Tensor:
        seed, purpose = config.train.seed, f"sampling step {number}"
        return clip_noise(batch.places, world.shape, seed, step, purpose).to(world.device)

    velocity = velocity_of(world, here, config.world.guidance_scale)
    found = sample_latents(velocity, here.start, world.sigmas, plan.steps, noise_of, set(plan.trained), free=here.free)
    latents = with_given(found.latents, here)
    if batch.counted and world.share.leads:
        pending.append((batch, *ask(world, batch, latents)))
    kept = {number: Kept(one.x.cpu(), one.x_next.cpu(), one.log_prob.cpu()) for number, one in found.trajectory.items()}
    return Sample(batch, latents.cpu(), kept, torch.zeros(len(batch)), {})


def pixels_of(world: ClipMaker, latents: Tensor) -> Tensor:
    """uint8 `[B, 3, T, H, W]`, on the device of the autoencoder."""
    return (world.codec.decode(latents) * 255).round().to(torch.uint8)


def ask(world: ClipMaker, batch: MicroBatch, latents: Tensor) -> tuple[Callable[[], Scores], list[Look]]:
    """Begin to score the clips; returns what waits for the scores, and what the clips look like.

    An error waits, too: raised here, it would leave the other ranks waiting in the next forward.
    """
    assert world.scorer is not None
    clips = pixels_of(world, latents)
    seen = look_at(clips)  # on the device: on a CPU a large clip takes seconds
    try:
        pending: Pending = world.scorer.start(clips.cpu(), latents.cpu(), batch.rows, world.size.fps)
    except DsReasonError as error:
        return raising(error), seen
    return pending.result, seen


def raising(error: DsReasonError) -> Callable[[], Scores]:
    def result() -> Scores:
        raise error

    return result


def fetch(pending: Sequence[tuple[MicroBatch, Callable[[], Scores], list[Look]]]) -> list[Scored]:
    """The rewards of all ranks' clips, in the order of their places. Collective.

    Raises:
        RewardError: on every rank, where one of them failed or is no number.
    """
    own: list[Scored] = []
    with errors_on_all_ranks():
        for batch, result, seen in pending:
            scores = result()
            if not torch.isfinite(scores.total).all():
                raise RewardError(f"the reward of {batch.rows[0].id} and those after it is {scores.total.tolist()}")
            own += [
                Scored(
                    place, float(scores.total[i]), {name: float(v[i]) for name, v in scores.by_name.items()}, seen[i]
                )
                for i, place in enumerate(batch.places)
            ]
    return sorted((one for part in gather_objects(own) for one in part), key=lambda one: one.place)


def reward_table(world: WorldRun, scored: Sequence[Scored]) -> Tensor:
    """`[P, G]`, float64."""
    values = torch.tensor([one.total for one in scored], dtype=torch.float64)
    return values.view(world.config.world.prompts_per_step, world.config.world.num_generations)


def with_advantages(
    world: WorldRun, samples: Sequence[Sequence[Sample]], scored: Sequence[Scored]
) -> list[list[Sample]]:
    config = world.config.world
    table = group_advantages(reward_table(world, scored), std=config.advantage_std, clip=config.advantage_clip)
    if config.algorithm == "ddrl" and config.exponential_advantages:
        table = exponential(table)

    def of(one: Sample) -> Sample:
        values = [float(table[place.prompt, place.clip]) for place in one.batch.places]
        return replace(one, advantages=torch.tensor(values, dtype=torch.float32))

    return [[of(one) for one in part] for part in samples]


def summarise(world: WorldRun, scored: Sequence[Scored]) -> dict[str, float]:
    """Metrics of a rollout: rewards, each by its name, and what would show that they are cheated."""
    table, size = reward_table(world, scored), world.config.world.num_generations
    found = {
        "reward/mean": float(table.mean()),
        "reward/std": float(table.std(dim=1).mean()),
        "reward/zero_std_fraction": float(equal_groups(table).double().mean()),
    }
    for name in scored[0].by_name:
        found[f"reward/{name}/mean"] = sum(one.by_name[name] for one in scored) / len(scored)
    groups = [[one.look for one in scored[i : i + size]] for i in range(0, len(scored), size)]
    return found | looks(groups, "clips")
