"""The training loop for world models: sampled or real clips → losses → optimizer step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.data.order import StepOrder
from dsreason.engine.average import WeightAverage
from dsreason.engine.engine import take_optimizer_step
from dsreason.job.ranks import World
from dsreason.world.losses import compute_nft_decay
from dsreason.world.schema import WorldConfig, WorldConfigSection
from dsreason.world.training import nft, sft, update
from dsreason.world.training.build import WorldTrainer, build_world
from dsreason.world.training.clips import ClipMicroBatch, SampledClips
from dsreason.world.training.gradients import count_clips
from dsreason.world.training.rollout import sample_rollout
from dsreason.world.training.velocity import ClipMaker

Part = list[Any]
"""Training data for an optimizer step: micro-batches of real clips, or of sampled clips."""


def run(config: WorldConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train until the last checkpoint and the export are on disk. Every rank of the job must call this."""
    with build_world(config, output_dir, resume) as trainer:
        train(trainer)


def train(trainer: WorldTrainer) -> None:
    run = trainer.run
    with run.save_before_error():
        run.begin_steps(trainer.validate)
        while run.state.step < run.total_steps:
            run.poll_checkpoint()
            first = run.state.step
            train_on_rollout(trainer)
            run.finish_steps(first, trainer.validate)
        run.finish()


def train_on_rollout(trainer: WorldTrainer) -> None:
    """Prepare the data for the next optimizer steps, and train on it."""
    run = trainer.run
    started, first = time.perf_counter(), run.state.step
    parts, rollout_metrics = prepare_parts(trainer)
    train_started = time.perf_counter()
    rollout_seconds = train_started - started
    for part in parts:
        run.profiler.begin(run.state.step + 1)
        with run.track_step():
            metrics = train_on_part(trainer, part, first + 1)
            now = time.perf_counter()
            times = {"time/rollout": rollout_seconds, "time/train": now - train_started}
            finish_step(trainer, part, metrics | times | rollout_metrics)
        rollout_seconds, train_started = 0.0, now  # only the rollout's first step includes the time for sampling


def prepare_parts(trainer: WorldTrainer) -> tuple[list[Part], dict[str, float]]:
    """Return the training data for the next optimizer steps, and the metrics of their rollout.

    For sft, these are the real clips for one step; for the other algorithms, the samples for all steps of a rollout.
    """
    run, maker, watchdog = trainer.run, trainer.clip_maker, trainer.job.watchdog
    config, step = maker.config.world, run.state.step
    if config.algorithm == "sft":
        with watchdog.track_phase("data"):
            indices = trainer.order.indices(step)
            batches, skipped = sft.read_next_batches(maker, trainer.training, indices, trainer.clips, step + 1)
            run.count_skipped(skipped)
        return [list(batches)], {}
    with watchdog.track_phase("rollout"):
        samples, metrics = sample_rollout(
            maker,
            trainer.training,
            trainer.order.indices(step // config.optimizer_steps_per_rollout),
            step=step + 1,
            old=trainer.averages.get("old"),
            watchdog=watchdog,
            memory=run.memory,
        )
    with watchdog.track_phase("prepare"):
        if config.algorithm == "nft":
            samples = nft.add_reference(maker, trainer.reference, samples, step + 1)
        else:
            samples = update.add_reference(maker, trainer.reference, samples)
    return [list(part) for part in samples], metrics


def train_on_part(trainer: WorldTrainer, part: Part, rollout_step: int) -> dict[str, float]:
    """Run an optimizer step and return its metrics. The result does not depend on the split into micro-batches and ranks."""
    run, maker = trainer.run, trainer.clip_maker
    engine, step = run.engine, run.state.step + 1
    with run.memory.track_phase("train"):
        metrics = accumulate_gradients(maker, engine, part, rollout_step=rollout_step, world=trainer.job.world)
        if step == rollout_step and "policy/ratio_error" in metrics:
            trainer.ratio_check.check(metrics["policy/ratio_error"], step)
        metrics |= take_optimizer_step(engine, run.learning_rate)
    metrics["train/grad_over_eps"] = trainer.epsilon_check.measure(engine, metrics["train/grad_norm"], step)
    metrics = run.finite.metrics(
        metrics, [list_tensors(item) for item in part], step, lambda: [describe_clips(item) for item in part]
    )
    update_averages(trainer.averages, maker.config, step)
    return metrics


def accumulate_gradients(
    maker: ClipMaker, engine: DeepSpeedEngine, part: Part, *, rollout_step: int, world: World
) -> dict[str, float]:
    """Run the forward and backward passes for all clips of a step; return the step's metrics."""
    algorithm = maker.config.world.algorithm
    if algorithm == "sft":  # each step of sft counts as a rollout
        return sft.accumulate_gradients(maker, engine, part, step=rollout_step, world=world)
    if algorithm == "nft":
        return nft.accumulate_gradients(maker, engine, part, rollout_step=rollout_step, world=world)
    return update.accumulate_gradients(maker, engine, part, rollout_step=rollout_step, world=world)


def update_averages(averages: Mapping[str, WeightAverage], config: WorldConfig, step: int) -> None:
    """Update the moving averages of the weights after an optimizer step."""
    train = config.train
    if "old" in averages:
        averages["old"].update(compute_nft_decay(config.world.nft_decay, step))
    if train.ema_decay is not None and step % train.ema_every == 0:
        averages["ema"].update(train.ema_decay)


def list_tensors(item: ClipMicroBatch | SampledClips) -> dict[str, Tensor]:
    """Return the tensors to save if the step's loss is not finite."""
    if isinstance(item, ClipMicroBatch):
        return {"noise": item.start} | ({} if item.clean is None else {"clean": item.clean})
    return {"noise": item.batch.start, "latents": item.latents, "advantages": item.advantages}


def describe_clips(item: ClipMicroBatch | SampledClips) -> list[Any]:
    """Return the row id, prompt and index of each clip, to be saved with its tensors."""
    batch = get_batch(item)
    return [
        {"id": row.id, "prompt": row.prompt, "number": [place.prompt, place.clip]}
        for place, row in zip(batch.places, batch.rows, strict=True)
    ]


def get_batch(item: ClipMicroBatch | SampledClips) -> ClipMicroBatch:
    return item if isinstance(item, ClipMicroBatch) else item.batch


def finish_step(trainer: WorldTrainer, part: Part, metrics: dict[str, float]) -> None:
    """Count the step, then log and display its metrics."""
    run, maker = trainer.run, trainer.clip_maker
    config, step = maker.config, run.engine.global_steps
    extra = {} if trainer.lora is None else {"lora": trainer.lora}  # needed to export the checkpoint
    epoch = step * config.samples_per_step / compute_clips_per_epoch(config.world, trainer.order)
    run.count_step(epoch=epoch, extra=extra)
    clips = count_clips([get_batch(item) for item in part], maker.share)
    _, frames, height, width = maker.inputs.shape
    seconds = metrics["time/rollout"] + metrics["time/train"]
    metrics = metrics | {"perf/clips_per_second": clips / seconds}
    name, key = ("reward", "reward/mean") if "reward/mean" in metrics else ("loss", "train/loss")
    run.show_step(
        metrics,
        {name: metrics[key]} if key in metrics else {},  # a skipped step has no loss
        num_samples=clips,
        num_tokens=clips * frames * height * width // 4,
        seconds=seconds,
    )


def compute_clips_per_epoch(config: WorldConfigSection, order: StepOrder) -> float:
    """Return the number of clips per epoch: one real clip per row for sft, otherwise a group of sampled clips per row."""
    return order.rows_per_epoch * (1 if config.algorithm == "sft" else config.num_generations)
