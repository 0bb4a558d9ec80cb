"""GRPO: prompts → completions of the policy → rewards → advantages → policy gradient."""

from __future__ import annotations

import math
import time
from pathlib import Path

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.micro_batches import work_of
from dsreason.engine.engine import engine_grad_norm, set_learning_rate
from dsreason.engine.reference import ReferencePolicy
from dsreason.errors import DsReasonError
from dsreason.job.ranks import gather_in_group, gather_objects
from dsreason.phases import record_phase
from dsreason.train.common.opening import validate_policy
from dsreason.train.common.saving import finish, poll_checkpoint
from dsreason.train.common.steps import after_steps, before_steps, count_step, learning_rate, show_step
from dsreason.train.grpo import mismatch
from dsreason.train.grpo.build import GRPORun, build_grpo
from dsreason.train.grpo.engine_check import check_engine
from dsreason.train.grpo.reference import reset_reference
from dsreason.train.grpo.rollouts import MicroBatch, Rollout, join_group, split_into_steps, training_sample
from dsreason.train.grpo.sampling import sample
from dsreason.train.grpo.show import describe, show
from dsreason.train.grpo.update import accumulate_gradients, add_fixed_logprobs, cut

SHOWN = {"reward": "reward/mean", "length": "completion/length_mean"}
"""In the progress bar."""
SHOWN_OF_TEACHER = {"distance": "distill/kl", "length": "completion/length_mean"}
"""The same where there is a teacher and no reward."""
MAX_UNTRAINED = 10
"""Rollouts in a row that may have nothing to train."""


def run(config: GRPOConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_grpo(config, output_dir, resume) as grpo:
        train(grpo)


def train(grpo: GRPORun) -> None:
    if grpo.config.rollout.self_test:
        check_engine(grpo)
    before_steps(grpo, validate_policy)
    while grpo.state.step < grpo.total_steps:
        poll_checkpoint(grpo)
        first = grpo.state.step
        train_on_rollout(grpo)
        after_steps(grpo, first, validate_policy)
    finish(grpo)


def train_on_rollout(grpo: GRPORun) -> None:
    """Completions of the policy as it is, and the optimizer steps over them."""
    started = time.perf_counter()
    with grpo.watchdog.phase("rollout"):
        rollouts, prompts = sample(grpo)
    sampled = time.perf_counter()
    with grpo.watchdog.phase("prepare"):
        show(grpo, rollouts)
        rollouts = join_group(rollouts, prompts, lambda own: gather_in_group(own, grpo.world))
        steps = optimizer_steps(grpo, rollouts)
    for micro_batches in steps:
        grpo.profiler.begin(grpo.state.step + 1)
        with grpo.watchdog.phase("step"):
            metrics = grpo_step(grpo, micro_batches)
            now = time.perf_counter()
            times = {"time/rollout": sampled - started, "time/train": now - sampled}
            finish_step(grpo, micro_batches, metrics | times)
        sampled = started = now  # a rollout's further steps cost no sampling


def optimizer_steps(grpo: GRPORun, rollouts: list[Rollout]) -> list[list[MicroBatch]]:
    """The micro-batches of each optimizer step over the trained rollouts; a step for which no rank has any is left out."""
    numbers = [rollout.group for rollout in rollouts if rollout.group is not None]
    num_groups = 1 + max(gather_objects(max(numbers, default=-1)))
    if grpo.objective.overlong_filter:
        rollouts = [rollout for rollout in rollouts if rollout.completion.finish_reason != "length"]
    parts = split_into_steps(rollouts, num_groups, grpo.config.grpo.optimizer_steps_per_rollout)
    row_part = grpo.world.row_part
    steps = [cut(part, grpo.config, grpo.encoder, row_part) for part in parts if any(gather_objects(bool(part)))]
    check_trained(grpo, steps)
    steps = steps[
        : grpo.total_steps - grpo.state.step
    ]  # where empty ones were left out before, the last may be too many
    return add_fixed_logprobs(steps, grpo.engine, grpo.reference, grpo.teacher, grpo.config, grpo.banned_ids)


def check_trained(grpo: GRPORun, steps: list[list[MicroBatch]]) -> None:
    """DsReasonError where rollout after rollout has nothing to train."""
    grpo.num_untrained = 0 if steps else grpo.num_untrained + 1
    if grpo.num_untrained == MAX_UNTRAINED:
        raise DsReasonError(
            f"step {grpo.state.step}: {MAX_UNTRAINED} rollouts in a row had no completion to train: their prompts were left "
            "out, or the overlong filter took all that were cut off at rollout.max_completion_length "
            f"({grpo.config.rollout.max_completion_length}); raise it, or set grpo.overlong_filter = false"
        )


def grpo_step(grpo: GRPORun, micro_batches: list[MicroBatch]) -> dict[str, float]:
    """One optimizer step over a part of a rollout, however it was cut into micro-batches and over ranks."""
    engine, config, step, lr = grpo.engine, grpo.config, grpo.state.step + 1, learning_rate(grpo)
    set_learning_rate(engine, lr)
    with grpo.memory.phase("train"):
        metrics, mismatches = accumulate_gradients(engine, micro_batches, config, grpo.world, grpo.banned_ids)
        folder = grpo.output_dir / "mismatch" if grpo.world.is_main else None
        if math.isfinite(metrics["train/loss"]):  # else it is no sign of two different policies
            mismatch.check(metrics, mismatches, config.rollout, step, folder)
        with record_phase("optimizer"):
            engine.step()
    metrics |= {"train/learning_rate": lr, "train/grad_norm": engine_grad_norm(engine)}
    return grpo.finite.metrics(
        metrics,
        [one.batch for one in micro_batches],
        step,
        lambda: [[describe(grpo, rollout) for rollout in one.rollouts] for one in micro_batches],
    )


def finish_step(grpo: GRPORun, micro_batches: list[MicroBatch], metrics: dict[str, float]) -> None:
    """Count the step and show it."""
    extra = {"next_batch": grpo.next_batch} | ({"teacher": grpo.teacher.fingerprint} if grpo.teacher else {})
    count_step(grpo, epoch=grpo.next_batch / grpo.batches_per_epoch, extra=extra)
    if isinstance(grpo.reference, ReferencePolicy):
        step, folder = grpo.state.step, grpo.output_dir
        reset_reference(grpo.reference, grpo.config, step, folder, grpo.model_path, grpo.world)
    work = work_of(
        [[training_sample(rollout) for rollout in one.rollouts] for one in micro_batches],
        packing=grpo.config.shares_prompts,
    )
    metrics |= grpo.arithmetic.metrics(work, [one.batch for one in micro_batches], metrics["time/train"])
    rollouts = [rollout for one in micro_batches for rollout in one.rollouts]
    own = sum(len(rollout.prompt.encoded) + len(rollout.completion.ids) for rollout in rollouts)
    tokens = sum(grpo.world.of_groups(gather_objects(own)))
    metrics |= grpo.rollout_metrics
    names = SHOWN if grpo.config.reward.functions else SHOWN_OF_TEACHER
    shown = {name: metrics[key] for name, key in names.items() if key in metrics}
    show_step(
        grpo,
        metrics,
        shown,
        num_samples=grpo.config.samples_per_step,
        num_tokens=tokens,
        seconds=metrics["time/rollout"] + metrics["time/train"],
    )
