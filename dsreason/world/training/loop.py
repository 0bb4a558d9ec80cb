"""Training of world models: clips, sampled or real → losses → optimizer step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dsreason.engine.engine import engine_grad_norm, set_learning_rate
from dsreason.job.ranks import gather_objects
from dsreason.phases import record_phase
from dsreason.train.common.saving import finish, poll_checkpoint
from dsreason.train.common.steps import after_steps, before_steps, count_step, learning_rate, show_step
from dsreason.world.losses import nft_decay
from dsreason.world.schema import WorldConfig
from dsreason.world.training import nft, sft, update
from dsreason.world.training.build import WorldRun, build_world
from dsreason.world.training.clips import MicroBatch, Sample
from dsreason.world.training.gradients import grad_over_eps
from dsreason.world.training.rollout import rollout
from dsreason.world.training.validate import validate

Part = list[Any]
"""What one optimizer step trains on: micro-batches of real clips, or samples."""


def run(config: WorldConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_world(config, output_dir, resume) as world:
        train(world)


def train(world: WorldRun) -> None:
    before_steps(world, validate)
    while world.state.step < world.total_steps:
        poll_checkpoint(world)
        started, first = time.perf_counter(), world.state.step
        parts = next_parts(world)
        prepared = time.perf_counter()
        for part in parts:
            world.profiler.begin(world.state.step + 1)
            with world.watchdog.phase("step"):
                metrics = world_step(world, part, first + 1)
                now = time.perf_counter()
                times = {"time/rollout": prepared - started, "time/train": now - prepared}
                finish_step(world, part, metrics | times)
            prepared = started = now  # a rollout's further steps cost no sampling
        after_steps(world, first, validate)
    finish(world)


def next_parts(world: WorldRun) -> list[Part]:
    """What the next optimizer steps train on: one step of real clips, or all steps of one rollout."""
    if world.config.world.algorithm == "sft":
        with world.watchdog.phase("data"):
            return [sft.next_batches(world)]
    with world.watchdog.phase("rollout"):
        samples = rollout(world)
    with world.watchdog.phase("prepare"):
        add_reference = nft.with_reference if world.config.world.algorithm == "nft" else update.with_reference
        return [list(part) for part in add_reference(world, samples, world.state.step + 1)]


def world_step(world: WorldRun, part: Part, rollout_step: int) -> dict[str, float]:
    """One optimizer step, however its clips are cut into micro-batches and over ranks."""
    engine, step, lr = world.engine, world.state.step + 1, learning_rate(world)
    set_learning_rate(engine, lr)
    with world.memory.phase("train"):
        metrics = gradients(world, part, step, rollout_step)
        with record_phase("optimizer"):
            engine.step()
    norm = engine_grad_norm(engine)
    metrics |= {"train/learning_rate": lr, "train/grad_norm": norm, "train/grad_over_eps": grad_over_eps(world, norm)}
    metrics = world.finite.metrics(
        metrics, [saved(one) for one in part], step, lambda: [described(one) for one in part]
    )
    follow(world, step)
    return metrics


def gradients(world: WorldRun, part: Part, step: int, rollout_step: int) -> dict[str, float]:
    """Forward and backward of all clips of a step; what is shown of them."""
    algorithm = world.config.world.algorithm
    if algorithm == "sft":
        return sft.accumulate(world, part, step)
    if algorithm == "nft":
        return nft.accumulate(world, part, rollout_step)
    return update.accumulate(world, part, step, rollout_step)


def follow(world: WorldRun, step: int) -> None:
    """The averages after an optimizer step."""
    train = world.config.train
    if "old" in world.averages:
        world.averages["old"].blend(nft_decay(world.config.world.nft_decay, step))
    if train.ema_decay is not None and step % train.ema_every == 0:
        world.averages["ema"].blend(train.ema_decay)


def saved(one: MicroBatch | Sample) -> dict[str, Any]:
    """What is kept of a step whose loss is not finite."""
    if isinstance(one, MicroBatch):
        return {"noise": one.start} | ({} if one.clean is None else {"clean": one.clean})
    return {"noise": one.batch.start, "latents": one.latents, "advantages": one.advantages}


def described(one: MicroBatch | Sample) -> list[Any]:
    batch = one if isinstance(one, MicroBatch) else one.batch
    return [
        {"id": row.id, "prompt": row.prompt, "number": [place.prompt, place.clip]}
        for place, row in zip(batch.places, batch.rows, strict=True)
    ]


def finish_step(world: WorldRun, part: Part, metrics: dict[str, float]) -> None:
    """Count the step and show it."""
    step = world.engine.global_steps
    extra = {} if world.lora is None else {"lora": world.lora}  # an export of the checkpoint needs it
    count_step(world, epoch=step * world.config.samples_per_step / rows_per_epoch(world), extra=extra)
    batches = [one if isinstance(one, MicroBatch) else one.batch for one in part]
    own = sum(len(batch) for batch in batches if batch.counted and world.share.leads)
    clips = sum(gather_objects(own))
    _, frames, height, width = world.shape
    seconds = metrics["time/rollout"] + metrics["time/train"]
    metrics = metrics | world.rollout_metrics | {"perf/clips_per_second": clips / seconds}
    name, key = ("reward", "reward/mean") if "reward/mean" in metrics else ("loss", "train/loss")
    show_step(
        world,
        metrics,
        {name: metrics[key]} if key in metrics else {},  # a skipped step has no loss
        num_samples=clips,
        num_tokens=clips * frames * height * width // 4,
        seconds=seconds,
    )


def rows_per_epoch(world: WorldRun) -> float:
    """In clips of the run's steps: each row has a group of them, or itself."""
    config = world.config.world
    return world.order.rows_per_epoch * (1 if config.algorithm == "sft" else config.num_generations)
