"""GRPO: prompts → completions of the policy → rewards → advantages → policy gradient."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema import GRPOConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.micro_batches import align_micro_batches, cut_by_count, cut_by_tokens
from dsreason.data.types import Batch
from dsreason.errors import DsReasonError
from dsreason.losses.advantages import ADVANTAGES
from dsreason.losses.corrections import CORRECTIONS
from dsreason.losses.kl import k3
from dsreason.losses.policy import GlobalCounts
from dsreason.losses.presets import PRESETS
from dsreason.rewards.text import with_length
from dsreason.rollout.protocol import Sampling
from dsreason.runtime.engine import engine_grad_norm, full_parameters, set_learning_rate
from dsreason.runtime.logs import set_step
from dsreason.runtime.schedule import lr_factor
from dsreason.runtime.world import World, all_sum, gather_objects
from dsreason.train.answers import media_paths
from dsreason.train.build_grpo import GRPORun, build_grpo
from dsreason.train.rollouts import Rollout, flatten, to_rollouts, training_sample
from dsreason.train.sft import finish, is_due, run_validation, save


def run(config: GRPOConfig, *, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_grpo(config, output_dir, resume) as grpo:
        train(grpo)


def train(grpo: GRPORun) -> None:
    config = grpo.config
    if grpo.state.step == 0 and config.validation.before_training:
        run_validation(grpo)
    for prompts in grpo.prompts:  # starts after the resumed rollout
        started, first = time.perf_counter(), grpo.state.step
        rollouts = sample(grpo, prompts)
        record(grpo, rollouts)
        sampled = time.perf_counter()
        parts = np.array_split(np.arange(len(rollouts)), config.grpo.optimizer_steps_per_rollout)
        batches = [micro_batches(grpo, [rollouts[i] for i in part]) for part in parts]
        olds = [old_logprobs(grpo, batch) if len(parts) > 1 else None for batch, _ in batches]
        for (batch, part), old in zip(batches, olds, strict=True):
            lr = config.optim.lr * lr_factor(grpo.state.step, grpo.total_steps, config.optim)
            with grpo.memory.phase("train"):
                metrics = grpo_step(grpo, batch, part, old, lr=lr)
            now = time.perf_counter()
            finish_step(grpo, part, metrics | {"time/rollout": sampled - started, "time/train": now - sampled})

        step, last = grpo.state.step, grpo.state.step == grpo.total_steps
        due = any(is_due(s, config.validation.every) for s in range(first + 1, step + 1))
        improved = run_validation(grpo) if last or due else False
        if last or improved or any(is_due(s, config.checkpoint.every) for s in range(first + 1, step + 1)):
            save(grpo, last=last)
    finish(grpo)


def sample(grpo: GRPORun, prompts: Sequence[EncodedPrompt]) -> list[Rollout]:
    """`num_generations` completions of each of this rank's prompts by the present policy, scored."""
    config, engine, step = grpo.config, grpo.rollout, grpo.state.step
    repeated = [prompt for prompt in prompts for _ in range(config.grpo.num_generations)]
    seed = int(np.random.SeedSequence((config.train.seed, step, grpo.world.rank)).generate_state(1)[0])
    sampling = Sampling(
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        seed=seed,
    )
    with grpo.memory.phase("rollout"):
        engine.wake()
        engine.sync(full_parameters(grpo.engine, config.rollout.sync_bucket_mb), version=step)
        completions = engine.generate(repeated, sampling, version=step)
        engine.sleep()
    samples = [
        with_length(prompt.sample, len(completion.ids), sampling.max_completion_length)
        for prompt, completion in zip(repeated, completions, strict=True)
    ]
    scores = grpo.scorer.score([completion.text for completion in completions], samples)
    advantages_of = ADVANTAGES[PRESETS[config.grpo.preset].advantage]
    return to_rollouts(repeated, completions, scores, config.grpo.num_generations, advantages_of)


def micro_batches(grpo: GRPORun, rollouts: list[Rollout]) -> tuple[list[Batch], list[Rollout]]:
    """The rollouts of one optimizer step, cut; every rank has as many micro-batches, with the same kinds of media."""
    train = grpo.config.train
    samples = [training_sample(rollout, i) for i, rollout in enumerate(rollouts)]
    if train.max_tokens_per_micro_batch is None:
        groups = cut_by_count(samples, train.micro_batch_size or 1)
    else:
        groups = cut_by_tokens(samples, train.max_tokens_per_micro_batch)
    return align_micro_batches(groups, grpo.encoder, gather_objects), rollouts


@torch.no_grad()
def old_logprobs(grpo: GRPORun, batches: list[Batch]) -> list[Tensor]:
    """Log-probabilities of the policy that sampled, by micro-batch, before any step of this rollout."""
    temperature = grpo.config.rollout.temperature
    return [grpo.engine(batch.to(grpo.engine.device), temperature, grpo.banned_ids) for batch in batches]


def grpo_step(
    grpo: GRPORun, batches: list[Batch], rollouts: list[Rollout], old: list[Tensor] | None, *, lr: float
) -> dict[str, float]:
    """One optimizer step over one part of a rollout, however it was cut into micro-batches and over ranks."""
    engine = grpo.engine
    set_learning_rate(engine, lr)
    metrics = accumulate_gradients(engine, batches, rollouts, old, grpo.config, grpo.world, grpo.banned_ids)
    engine.step()
    metrics |= {"train/learning_rate": lr, "train/grad_norm": engine_grad_norm(engine)}
    if not all(math.isfinite(metrics[name]) for name in ("train/loss", "train/grad_norm")):
        raise DsReasonError(
            f"step {engine.global_steps}: loss {metrics['train/loss']}, gradient norm {metrics['train/grad_norm']} with "
            f"learning rate {lr:g}; lower optim.lr"
        )
    return metrics


def accumulate_gradients(
    engine: DeepSpeedEngine,
    batches: list[Batch],
    rollouts: list[Rollout],
    old: list[Tensor] | None,
    config: GRPOConfig,
    world: World,
    banned_ids: Tensor,
) -> dict[str, float]:
    """Forward and backward of every micro-batch; returns loss, clip fraction and mismatch over the global batch."""
    preset = PRESETS[config.grpo.preset]
    clip_low = preset.clip_low if config.grpo.clip_low is None else config.grpo.clip_low
    clip_high = preset.clip_high if config.grpo.clip_high is None else config.grpo.clip_high
    counts = GlobalCounts(
        num_tokens=int(all_sum(sum(len(rollout.completion.ids) for rollout in rollouts))),
        num_sequences=int(all_sum(len(rollouts))),
        max_length=config.rollout.max_completion_length,
    )
    sums = dict.fromkeys(("loss", "clipped", "mismatch"), 0.0)
    largest = 0.0
    for i, batch in enumerate(batches):  # every rank runs the same number: forwards are collectives
        last = i == len(batches) - 1
        logprobs = engine(batch.to(engine.device), config.rollout.temperature, banned_ids)
        flat = flatten(batch, rollouts, engine.device)
        before = logprobs.detach() if old is None else old[i]
        correction = None
        if config.grpo.correction != "none":
            correction = CORRECTIONS[config.grpo.correction](before - flat.rollout_logprobs, flat.sequence)
        result = preset.loss(
            logprobs,
            before,
            flat.advantages,
            flat.sequence,
            counts=counts,
            clip_low=clip_low,
            clip_high=clip_high,
            correction=correction,
        )
        engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the loss is a share of the global one already, so undo that.
        engine.backward(result.loss * world.size, scale_wrt_gas=False)
        if not last:
            engine.step()
        sums["loss"] += result.loss.item()
        sums["clipped"] += float(result.clipped.sum())
        sums["mismatch"] += float(k3(flat.rollout_logprobs, before).sum())
        largest = max([largest, *(before - flat.rollout_logprobs).abs().tolist()])
    return {
        "train/loss": all_sum(sums["loss"]),
        "policy/clip_fraction": all_sum(sums["clipped"]) / max(counts.num_tokens, 1),
        "mismatch/kl": all_sum(sums["mismatch"]) / max(counts.num_tokens, 1),
        "mismatch/max_abs_logprob": max(gather_objects(largest)),
    }


def record(grpo: GRPORun, rollouts: list[Rollout]) -> None:
    """`rollouts/step_N.jsonl` with every completion of all ranks, and the metrics of the rollout; rank 0 writes."""
    step = grpo.state.step
    rows = [row for part in gather_objects([describe(rollout) for rollout in rollouts]) for row in part]
    grpo.rollout_metrics = summarise(rows, grpo.config.grpo.num_generations)
    if grpo.world.is_main:
        folder = grpo.output_dir / "rollouts"
        folder.mkdir(exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"step_{step}.jsonl").write_text("".join(lines), encoding="utf-8")


def describe(rollout: Rollout) -> dict[str, object]:
    sample, completion = rollout.prompt.sample, rollout.completion
    return {
        "id": sample.id,
        "version": completion.version,
        "completion": completion.text,
        "length": len(completion.ids),
        "finish_reason": completion.finish_reason,
        "reference": sample.answer,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "advantage": rollout.advantage,
        "media": media_paths(sample),
    }


def summarise(rows: list[dict[str, object]], num_generations: int) -> dict[str, float]:
    """Metrics of a rollout from its rows, in which the completions of a prompt follow each other."""
    rewards = np.array([row["reward"] for row in rows], dtype=np.float64).reshape(-1, num_generations)
    lengths = np.array([row["length"] for row in rows], dtype=np.float64)
    by_function = {name: np.array([row["rewards"][name] for row in rows]) for name in rows[0]["rewards"]}  # type: ignore[index,attr-defined]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_std_fraction": float((np.ptp(rewards, axis=1) == 0).mean()),
        **{f"reward/{name}/mean": float(values.mean()) for name, values in by_function.items()},
        "completion/length_mean": float(lengths.mean()),
        "completion/truncated_fraction": float(np.mean([row["finish_reason"] == "length" for row in rows])),
    }


def finish_step(grpo: GRPORun, rollouts: list[Rollout], metrics: dict[str, float]) -> None:
    """Count the step and show it."""
    step = grpo.engine.global_steps
    consumed = step * grpo.config.samples_per_step
    grpo.state = replace(grpo.state, step=step, epoch=step / grpo.steps_per_epoch, consumed_samples=consumed)
    set_step(step)
    tokens = int(all_sum(sum(len(r.prompt.encoded) + len(r.completion.ids) for r in rollouts)))
    grpo.progress.step(step, loss=metrics["train/loss"], samples=grpo.config.samples_per_step, tokens=tokens)
    metrics |= grpo.rollout_metrics | grpo.rollout.stats() | grpo.memory.take() | {"train/epoch": grpo.state.epoch}
    metrics["perf/tokens_per_second"] = tokens / (metrics["time/rollout"] + metrics["time/train"])
    if step % grpo.config.monitor.log_every == 0 or step == grpo.total_steps:
        grpo.metrics.scalars(step, metrics)
