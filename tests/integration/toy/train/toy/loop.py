"""A minimal trainer, in which each rank takes its rows in order."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deepspeed import DeepSpeedEngine
from dsreason.config.schema_toy import ToyConfig
from dsreason.train.toy.preflight import check

from dsreason.data.micro_batches import align_micro_batches
from dsreason.engine.engine import add_gradient, take_optimizer_step
from dsreason.job.ranks import gather_objects, reduce_sum
from dsreason.losses.sft import compute_sft_loss
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.train.common.answers import ValidationResult
from dsreason.train.common.job import TrainingJob
from dsreason.train.common.nonfinite import FiniteCheck
from dsreason.train.common.opening import (
    TrainingRows,
    build_policy_engine,
    open_policy_job,
    start_policy,
    start_policy_run,
)
from dsreason.train.common.run import TrainingRun
from dsreason.train.common.sampler import Sampler
from dsreason.train.common.validate import HeldOut, validate


@dataclass
class ToyTrainer:
    job: TrainingJob[ToyConfig]
    run: TrainingRun[ToyConfig]
    engine: DeepSpeedEngine
    sampler: Sampler
    rows: TrainingRows

    def validate(self, step: int) -> ValidationResult | None:
        held_out = HeldOut(self.rows.validation, self.rows.encoder, self.job.config, self.job.world)
        return validate(self.sampler, held_out, version=step, progress=self.run.progress)


def run(config: ToyConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    with ExitStack() as stack:
        job, rows = open_policy_job(config, output_dir, resume, command="toy", check=check, stack=stack)
        config, model_path = job.config, job.model_path
        engine = build_policy_engine(config, job.deepspeed, model_path)
        state = start_policy(job, engine)
        steps = config.train.max_steps or len(rows.training) // config.toy.batch_size
        run, sampler = start_policy_run(
            job, rows, stack, engine=engine, settings=TransformersSettings(), state=state, total_steps=steps
        )
        train(ToyTrainer(job, run, engine, sampler, rows))


def train(toy: ToyTrainer) -> None:
    run, engine, batch_size = toy.run, toy.engine, toy.job.config.toy.batch_size
    with run.save_before_error():
        run.begin_steps(toy.validate)
        while run.state.step < run.total_steps:
            run.poll_checkpoint()
            started, first = time.perf_counter(), run.state.step
            with run.track_step(), run.memory.track_phase("train"):
                metrics, num_tokens = toy_step(engine, toy.rows, toy.job, first, run.learning_rate, run.finite)
                run.count_step(epoch=engine.global_steps * batch_size / len(toy.rows.training))
            seconds = time.perf_counter() - started
            run.show_step(metrics, {}, num_samples=batch_size, num_tokens=num_tokens, seconds=seconds)
            run.finish_steps(first, toy.validate)
        run.finish()


def toy_step(
    engine: DeepSpeedEngine, rows: TrainingRows, job: TrainingJob[ToyConfig], step: int, lr: float, finite: FiniteCheck
) -> tuple[dict[str, float], int]:
    """Run one optimizer step over this rank's share of the next rows."""
    world, config, size = job.world, job.config, job.config.toy.batch_size
    numbers = range(step * size, (step + 1) * size)[world.rank :: world.size]
    samples = [rows.encoder.encode(rows.training[number % len(rows.training)]) for number in numbers]
    (batch,) = align_micro_batches([samples], rows.encoder, gather_objects, packing=config.train.packing)
    num_tokens = int(reduce_sum(sum(map(len, samples))))
    loss = config.toy.scale * compute_sft_loss(engine(batch.to(engine.device)), num_tokens=num_tokens)
    add_gradient(engine, loss, world.size, last=True)
    metrics = {"train/loss": reduce_sum(loss.item())} | take_optimizer_step(engine, lr)
    return finite.metrics(metrics, [batch], engine.global_steps), num_tokens
