"""GRPO: prompts → completions of the policy → rewards → advantages → policy gradient."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.prompts import Prompts
from dsreason.errors import DsReasonError
from dsreason.rewards.text import with_length
from dsreason.rollout.protocol import RolloutEngine, Sampling
from dsreason.runtime.engine import engine_grad_norm, set_learning_rate
from dsreason.runtime.logs import set_step
from dsreason.runtime.schedule import lr_factor
from dsreason.runtime.world import all_sum, gather_objects
from dsreason.train.grpo import mismatch
from dsreason.train.grpo.build import GRPORun, build_grpo
from dsreason.train.grpo.engine_check import check_engine
from dsreason.train.grpo.reference import reset_reference
from dsreason.train.grpo.rollouts import (
    Group,
    Rollout,
    choose,
    cut_steps,
    informative,
    rollouts_of,
    to_groups,
    to_rollouts,
)
from dsreason.train.grpo.show import describe, show
from dsreason.train.grpo.update import Part, accumulate_gradients, add_fixed_logprobs, cut
from dsreason.train.sft.loop import finish, follow_up, is_due, note_skipped, run_validation, save, stop_if_asked

SHOWN = {"reward": "reward/mean", "length": "completion/length_mean"}
"""In the progress bar."""
MAX_UNTRAINED = 10
"""Rollouts in a row that may have nothing to train."""


def run(config: GRPOConfig, *, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_grpo(config, output_dir, resume) as grpo:
        train(grpo)


def train(grpo: GRPORun) -> None:
    config = grpo.config
    if config.rollout.self_test:
        check_engine(grpo)
    if grpo.state.step == 0 and config.validation.before_training:
        run_validation(grpo)
    while grpo.state.step < grpo.total_steps:
        with grpo.watchdog.phase("checkpoint"):
            follow_up(grpo, grpo.writer.poll())
        started, first = time.perf_counter(), grpo.state.step
        with grpo.watchdog.phase("rollout"):
            rollouts = sample(grpo)
        sampled = time.perf_counter()
        with grpo.watchdog.phase("prepare"):
            show(grpo, rollouts)
            parts = optimizer_steps(grpo, rollouts)
        for part in parts:
            with grpo.watchdog.phase("step"):
                metrics = grpo_step(grpo, part)
                now = time.perf_counter()
                finish_step(grpo, part, metrics | {"time/rollout": sampled - started, "time/train": now - sampled})
            sampled = started = now  # a rollout's further steps cost no sampling

        steps, last = range(first + 1, grpo.state.step + 1), grpo.state.step == grpo.total_steps
        due = any(is_due(step, config.validation.every) for step in steps)
        improved = run_validation(grpo) if last or due else False
        if last or improved or any(is_due(step, config.checkpoint.every) for step in steps):
            save(grpo, last=last)
        stop_if_asked(grpo)
    finish(grpo)


def sample(grpo: GRPORun) -> list[Rollout]:
    """Scored completions of the next prompts by the present policy; sampling dynamically, also of the prompts after."""
    config, wanted = grpo.config.grpo, grpo.config.grpo.prompts_per_step
    grpo.rollout_metrics = dict.fromkeys(("time/data", "time/reward"), 0.0)
    dynamic = grpo.objective.dynamic_sampling
    groups: list[Group] = []
    with grpo.sampler.awake(version=grpo.state.step) as engine:
        for _ in range(1 + config.max_refills if dynamic else 1):
            groups += sample_groups(grpo, engine, next_prompts(grpo))
            kept = informative(groups, config.dynamic_tolerance) if dynamic else [True] * len(groups)
            if all_sum(sum(kept)) >= wanted:
                break
    groups = choose(groups, kept, wanted, gather_objects)
    return to_rollouts(groups, grpo.objective.advantages, gather_objects)


def next_prompts(grpo: GRPORun) -> Prompts:
    """This rank's share of the next prompts."""
    started = time.perf_counter()
    with grpo.watchdog.phase("data"):
        prompts = next(grpo.prompts)
    grpo.rollout_metrics["time/data"] += time.perf_counter() - started
    note_skipped(grpo, prompts.skipped)
    grpo.next_batch = prompts.batch + 1
    return prompts


def sample_groups(grpo: GRPORun, engine: RolloutEngine, prompts: Prompts) -> list[Group]:
    """`num_generations` completions of each of this rank's prompts, scored."""
    rollout, size = grpo.config.rollout, grpo.config.grpo.num_generations
    seed = int(np.random.SeedSequence((grpo.config.train.seed, prompts.batch)).generate_state(1)[0])
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_completion_length=rollout.max_completion_length,
        seed=seed,
    )
    repeated = [prompt for prompt in prompts.prompts for _ in range(size)]
    streams = [number * size + i for number in prompts.numbers for i in range(size)]  # the same on any number of ranks
    completions = engine.generate(repeated, sampling, version=grpo.state.step, streams=streams)

    started = time.perf_counter()
    samples = [
        with_length(prompt.sample, len(completion.ids), sampling.max_completion_length)
        for prompt, completion in zip(repeated, completions, strict=True)
    ]
    with grpo.watchdog.phase("reward"):
        scores = grpo.scorer.score([completion.text for completion in completions], samples)
    grpo.rollout_metrics["time/reward"] += time.perf_counter() - started
    grpo.reward_sums.append(scores.metric_sums)
    return to_groups([(prompts.batch, number) for number in prompts.numbers], prompts.prompts, completions, scores)


def optimizer_steps(grpo: GRPORun, rollouts: list[Rollout]) -> list[Part]:
    """The trained rollouts by optimizer step, as micro-batches; a step for which no rank has any is left out."""
    numbers = [rollout.group for rollout in rollouts if rollout.group is not None]
    num_groups = 1 + max(gather_objects(max(numbers, default=-1)))
    if grpo.objective.overlong_filter:
        rollouts = [rollout for rollout in rollouts if rollout.completion.finish_reason != "length"]
    steps = cut_steps(rollouts, num_groups, grpo.config.grpo.optimizer_steps_per_rollout)
    parts = [cut(step, grpo.config, grpo.encoder) for step in steps]
    parts = [part for part in parts if any(gather_objects(bool(part.rollouts)))]
    check_trained(grpo, parts)
    parts = parts[
        : grpo.total_steps - grpo.state.step
    ]  # where empty ones were left out before, the last may be too many
    return add_fixed_logprobs(parts, grpo.engine, grpo.reference, grpo.config, grpo.banned_ids)


def check_trained(grpo: GRPORun, parts: list[Part]) -> None:
    """DsReasonError where rollout after rollout has nothing to train."""
    grpo.num_untrained = 0 if parts else grpo.num_untrained + 1
    if grpo.num_untrained == MAX_UNTRAINED:
        raise DsReasonError(
            f"step {grpo.state.step}: {MAX_UNTRAINED} rollouts in a row had no completion to train: their prompts were left "
            "out, or the overlong filter took all that were cut off at rollout.max_completion_length "
            f"({grpo.config.rollout.max_completion_length}); raise it, or set grpo.overlong_filter = false"
        )


def grpo_step(grpo: GRPORun, part: Part) -> dict[str, float]:
    """One optimizer step over one part of a rollout, however it was cut into micro-batches and over ranks."""
    engine, config, step = grpo.engine, grpo.config, grpo.state.step + 1
    lr = config.optim.lr * lr_factor(grpo.state.step, grpo.total_steps, config.optim)
    set_learning_rate(engine, lr)
    with grpo.memory.phase("train"):
        update = accumulate_gradients(engine, part, config, grpo.world, grpo.banned_ids)
        folder = grpo.output_dir / "mismatch" if grpo.world.is_main else None
        if math.isfinite(update.metrics["train/loss"]):  # else it is no sign of two different policies
            mismatch.check(update.metrics, update.worst, config.rollout, step, folder)
        engine.step()
    metrics = update.metrics | {"train/learning_rate": lr, "train/grad_norm": engine_grad_norm(engine)}
    return grpo.finite.metrics(
        metrics, part.batches, step, lambda batch: [describe(grpo, one) for one in rollouts_of(batch, part.rollouts)]
    )


def finish_step(grpo: GRPORun, part: Part, metrics: dict[str, float]) -> None:
    """Count the step and show it."""
    step = grpo.engine.global_steps
    grpo.state = replace(
        grpo.state,
        step=step,
        epoch=grpo.next_batch / grpo.batches_per_epoch,
        consumed_samples=step * grpo.config.samples_per_step,
        extra={"next_batch": grpo.next_batch, **grpo.finite.counts},
    )
    set_step(step)
    if grpo.reference is not None:
        reset_reference(grpo.reference, grpo.config, step, grpo.output_dir, grpo.model_path, grpo.world)
    tokens = int(all_sum(sum(len(r.prompt.encoded) + len(r.completion.ids) for r in part.rollouts)))
    shown = {name: grpo.rollout_metrics[key] for name, key in SHOWN.items() if key in grpo.rollout_metrics}
    grpo.progress.step(step, shown, samples=grpo.config.samples_per_step, tokens=tokens)
    metrics |= (
        grpo.rollout_metrics | grpo.sampler.rollout.stats() | grpo.memory.take() | {"train/epoch": grpo.state.epoch}
    )
    metrics["perf/tokens_per_second"] = tokens / (metrics["time/rollout"] + metrics["time/train"])
    if step % grpo.config.monitor.log_every == 0 or step == grpo.total_steps:
        grpo.metrics.scalars(step, metrics)
