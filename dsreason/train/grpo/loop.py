"""The GRPO training loop: prompts → completions from the policy → rewards → advantages → policy gradient."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.micro_batches import compute_work
from dsreason.engine.engine import take_optimizer_step
from dsreason.engine.reference import ReferencePolicy
from dsreason.errors import NothingLearned
from dsreason.job.ranks import World, gather_in_group, gather_objects
from dsreason.losses.objective import Objective
from dsreason.train.grpo import mismatch
from dsreason.train.grpo.build import GRPOTrainer, build_grpo
from dsreason.train.grpo.engine_check import check_engine, encode_prompt_per_modality
from dsreason.train.grpo.reference import reset_reference
from dsreason.train.grpo.reward_counts import RolloutCounts
from dsreason.train.grpo.rollouts import Rollout, RolloutMicroBatch, build_training_sample, join_group, split_into_steps
from dsreason.train.grpo.sampling import SampledRollouts
from dsreason.train.grpo.show import describe, show_rollouts
from dsreason.train.grpo.update import accumulate_gradients, add_fixed_logprobs, split_into_micro_batches

SHOWN = {"reward": "reward/mean", "length": "completion/length_mean"}
"""Metrics displayed in the progress bar: label → metric key."""
SHOWN_OF_TEACHER = {"distance": "distill/kl", "length": "completion/length_mean"}
"""Metrics displayed in the progress bar of a run that has a teacher but no reward."""
MAX_UNTRAINED = 10
"""Number of consecutive rollouts without a trainable completion after which the run stops."""


def run(config: GRPOConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Run GRPO training; every rank of a job calls this. Return once the last checkpoint and the export are on disk."""
    with build_grpo(config, output_dir, resume) as grpo:
        train(grpo)


def train(grpo: GRPOTrainer) -> None:
    run = grpo.run
    with run.save_before_error():
        if grpo.job.config.rollout.self_test:
            check_rollout_engine(grpo)
        run.begin_steps(grpo.validate)
        while run.state.step < run.total_steps:
            run.poll_checkpoint()
            first = run.state.step
            train_on_rollout(grpo)
            run.finish_steps(first, grpo.validate)
        run.finish(grpo.watch.summarize())


def check_rollout_engine(grpo: GRPOTrainer) -> None:
    """Check that the rollout engine receives the weights and computes the same log-probabilities as the trainer."""
    job, progress = grpo.job, grpo.run.progress
    prompts = encode_prompt_per_modality(grpo.rows.training, grpo.prompt_encoder)
    with job.watchdog.track_phase("self_test"), progress.track_phase("self-test of the rollout engine"):
        step = grpo.run.state.step
        check_engine(grpo.sampler, prompts, job.config, grpo.rows.encoder, grpo.banned_ids, step, progress)


def train_on_rollout(grpo: GRPOTrainer) -> None:
    """Sample completions from the current policy and train on them in one or more optimizer steps."""
    run, watchdog = grpo.run, grpo.job.watchdog
    started = time.perf_counter()
    with watchdog.track_phase("rollout"):
        sampled = grpo.rollouts.sample(run.state.step)
    train_started = time.perf_counter()
    sampling_seconds = train_started - started
    with watchdog.track_phase("prepare"):
        rollout_metrics, counts = show_sampled(grpo, sampled)
        grpo.watch.add(counts)
        steps = prepare_steps(grpo, sampled)
    for micro_batches in steps:
        run.profiler.begin(run.state.step + 1)
        with run.track_step():
            metrics = train_on_step(grpo, micro_batches)
            now = time.perf_counter()
            times = {"time/rollout": sampling_seconds, "time/train": now - train_started}
            learned = counts.learned > 0 or grpo.teacher is not None
            finish_step(grpo, micro_batches, metrics | times, rollout_metrics, learned=learned)
        # The time spent on sampling counts only towards the first step after a rollout.
        sampling_seconds, train_started = 0.0, now


def show_sampled(grpo: GRPOTrainer, sampled: SampledRollouts) -> tuple[dict[str, float], RolloutCounts]:
    """Log the completions; return the rollout's metrics, and counts that show whether the policy can learn from it."""
    job = grpo.job
    return show_rollouts(
        sampled,
        grpo.run.state.step,
        job.config,
        tokenizer=grpo.rows.encoder.processor.tokenizer,
        world=job.world,
        output_dir=job.output_dir,
        metrics=grpo.run.metrics,
    )


def prepare_steps(grpo: GRPOTrainer, sampled: SampledRollouts) -> list[list[RolloutMicroBatch]]:
    """Split the rollouts into optimizer steps and add the log-probabilities that stay fixed during these steps."""
    run, config, world = grpo.run, grpo.job.config, grpo.job.world
    rollouts = join_group(sampled.rollouts, sampled.prompts, lambda rollouts: gather_in_group(rollouts, world))
    steps = cut_into_steps(rollouts, grpo.objective, config, grpo.rows.encoder, world)
    grpo.num_untrained = 0 if steps else grpo.num_untrained + 1
    check_trained(grpo.num_untrained, run.state.step, config, grpo.watch.list_recent())
    # The last rollout may yield more steps than remain in the run, because earlier rollouts may have yielded fewer steps
    # than planned.
    remaining_steps = run.total_steps - run.state.step
    return add_fixed_logprobs(
        steps[:remaining_steps], grpo.engine, grpo.reference, grpo.teacher, config, grpo.banned_ids
    )


def train_on_step(grpo: GRPOTrainer, micro_batches: list[RolloutMicroBatch]) -> dict[str, float]:
    """Run one optimizer step on a part of a rollout and return the step's metrics."""
    run, job = grpo.run, grpo.job
    step = run.state.step + 1
    with run.memory.track_phase("train"):
        metrics = run_grpo_step(
            grpo.engine,
            micro_batches,
            lr=run.learning_rate,
            config=job.config,
            world=job.world,
            banned_ids=grpo.banned_ids,
            step=step,
            mismatch_folder=job.output_dir / "mismatch" if job.world.is_main else None,
        )
    batches = [micro_batch.batch for micro_batch in micro_batches]
    describe_rollouts = partial(describe_batches, micro_batches, grpo.rows.encoder.processor.tokenizer)
    return run.finite.metrics(metrics, batches, step, describe_rollouts)


def cut_into_steps(
    rollouts: list[Rollout], objective: Objective, config: GRPOConfig, encoder: Encoder, world: World
) -> list[list[RolloutMicroBatch]]:
    """Split the rollouts to train on into optimizer steps, and each step into micro-batches. Collective.

    Steps without rollouts on any rank are omitted.
    """
    numbers = [rollout.group for rollout in rollouts if rollout.group is not None]
    num_groups = 1 + max(gather_objects(max(numbers, default=-1)))
    if objective.overlong_filter:
        rollouts = [rollout for rollout in rollouts if rollout.completion.finish_reason != "length"]
    parts = split_into_steps(rollouts, num_groups, config.grpo.optimizer_steps_per_rollout)
    return [
        split_into_micro_batches(part, config, encoder, world.row_part)
        for part in parts
        if any(gather_objects(bool(part)))
    ]


def check_trained(num_untrained: int, step: int, config: GRPOConfig, problems: Sequence[str]) -> None:
    """Raise NothingLearned after `MAX_UNTRAINED` consecutive rollouts without a trainable completion.

    Args:
        problems: problems found in recent rollouts, which are the likely causes.
    """
    if num_untrained == MAX_UNTRAINED:
        causes = problems or [
            "their prompts were skipped, dynamic sampling found no group with different scores, or the overlong filter "
            "removed all completions, because they were cut off at rollout.max_completion_length "
            f"({config.rollout.max_completion_length}); raise it, or set grpo.overlong_filter = false"
        ]
        raise NothingLearned(
            "\n  ".join([f"step {step}: {MAX_UNTRAINED} consecutive rollouts had no completion to train on", *causes])
        )


def run_grpo_step(
    engine: DeepSpeedEngine,
    micro_batches: list[RolloutMicroBatch],
    *,
    lr: float,
    config: GRPOConfig,
    world: World,
    banned_ids: Tensor,
    step: int,
    mismatch_folder: Path | None,
) -> dict[str, float]:
    """Run one optimizer step on a part of a rollout. The result does not depend on how the part is divided into micro-batches.

    If the log-probabilities of the rollout engine and the trainer differ too much, rank 0 saves the worst completions
    to `mismatch_folder`.
    """
    metrics, mismatches = accumulate_gradients(engine, micro_batches, config, world, banned_ids)
    # If the loss is not finite, a mismatch is no evidence that the engine and the trainer compute different policies.
    if math.isfinite(metrics["train/loss"]):
        mismatch.check(metrics, mismatches, config.rollout, step, mismatch_folder)
    return metrics | take_optimizer_step(engine, lr)


def describe_batches(micro_batches: list[RolloutMicroBatch], tokenizer: Any) -> list[list[Any]]:
    return [[describe(rollout, tokenizer) for rollout in micro_batch.rollouts] for micro_batch in micro_batches]


def finish_step(
    grpo: GRPOTrainer,
    micro_batches: list[RolloutMicroBatch],
    metrics: dict[str, float],
    rollout_metrics: dict[str, float],
    *,
    learned: bool,
) -> None:
    """Finish a step: count it, reset the reference if a reset is due, and log the step's metrics."""
    run, job, config = grpo.run, grpo.job, grpo.job.config
    epoch = grpo.rollouts.next_batch / grpo.batches_per_epoch
    run.count_step(epoch=epoch, extra=grpo.extra, learned=learned)
    if isinstance(grpo.reference, ReferencePolicy):
        reset_reference(grpo.reference, config, run.state.step, job.output_dir, job.model_path, job.world)
    samples = [[build_training_sample(rollout) for rollout in micro_batch.rollouts] for micro_batch in micro_batches]
    work = compute_work(samples, packing=config.shares_prompts)
    batches = [micro_batch.batch for micro_batch in micro_batches]
    metrics |= grpo.utilisation.metrics(work, batches, metrics["time/train"])
    rollouts = [rollout for micro_batch in micro_batches for rollout in micro_batch.rollouts]
    local_tokens = sum(len(rollout.prompt.encoded) + rollout.completion.num_tokens for rollout in rollouts)
    num_tokens = sum(job.world.select_group_values(gather_objects(local_tokens)))
    metrics |= rollout_metrics
    names = SHOWN if config.reward.functions else SHOWN_OF_TEACHER
    run.show_step(
        metrics,
        {name: metrics[key] for name, key in names.items() if key in metrics},
        num_samples=config.samples_per_step,
        num_tokens=num_tokens,
        seconds=metrics["time/rollout"] + metrics["time/train"],
    )
