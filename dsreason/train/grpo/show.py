"""What a person sees of the rollouts: a file with all of them, their metrics, and some with their media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsreason.data.contact_sheet import contact_sheet
from dsreason.data.messages import media_paths
from dsreason.files.step_names import step_name
from dsreason.job.ranks import gather_objects
from dsreason.train.common.answers import modality_of, question_of, write_rows
from dsreason.train.grpo.build import GRPORun
from dsreason.train.grpo.rollouts import Rollout


def show(grpo: GRPORun, rollouts: Sequence[Rollout]) -> None:
    """`rollouts/step_N.jsonl`, metrics, and from time to time completions in TensorBoard. Collective; rank 0 writes."""
    step, config = grpo.state.step, grpo.config
    every = config.rollout.show_every
    is_due = every > 0 and step % every < config.grpo.optimizer_steps_per_rollout
    shown = sheets(rollouts, grpo, config.rollout.show) if is_due else []
    parts = gather_objects(([describe(grpo, rollout) for rollout in rollouts], shown, grpo.reward_sums))
    grpo.reward_sums = []
    rows = [row for found, *_ in parts for row in found]
    grpo.rollout_metrics |= summarise(rows, config.grpo.num_generations)
    grpo.rollout_metrics |= reward_means([one for *_, sums in parts for one in sums])
    if not grpo.world.is_main:
        return
    write_rows(grpo.output_dir / "rollouts" / f"{step_name(step)}.jsonl", rows)
    if is_due and rows:
        advantages = np.array([row["advantage"] for row in rows if row["trained"]])
        if len(advantages):
            grpo.metrics.log_histogram(step, "rollout/advantage", advantages)
        for name in rows[0]["rewards"]:
            grpo.metrics.log_histogram(step, f"reward/{name}", np.array([row["rewards"][name] for row in rows]))
        examples = [one for _, found, _ in parts for one in found]
        grpo.metrics.log_text(step, "rollout/completions", "\n\n".join(text for text, _ in examples))
        grpo.metrics.log_images(step, "rollout/completions", [sheet for _, sheet in examples])


def describe(grpo: GRPORun, rollout: Rollout) -> dict[str, Any]:
    sample, completion = rollout.prompt.sample, rollout.completion
    return {
        "id": sample.id,
        "modality": modality_of(sample),
        "version": completion.version,
        "prompt": grpo.encoder.processor.tokenizer.decode(rollout.prompt.prompt_ids),
        "completion": completion.text,
        "length": len(completion.ids),
        "finish_reason": completion.finish_reason,
        "reference": sample.answer,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "advantage": rollout.advantage,
        "trained": rollout.group is not None,
        "media": media_paths(sample.messages),
    }


def summarise(rows: Sequence[dict[str, Any]], num_generations: int) -> dict[str, float]:
    """Metrics of a rollout from its rows, in which the completions of a prompt follow each other.

    They are of all that was sampled, also of what dynamic sampling or the overlong filter then leaves out.
    """
    if not rows:  # all were left out
        return {}
    rewards = np.array([row["reward"] for row in rows], dtype=np.float64).reshape(-1, num_generations)
    lengths = np.array([row["length"] for row in rows], dtype=np.float64)
    by_function = {name: np.array([row["rewards"][name] for row in rows]) for name in rows[0]["rewards"]}
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_std_fraction": float((np.ptp(rewards, axis=1) == 0).mean()),
        **{f"reward/{name}/mean": float(values.mean()) for name, values in by_function.items()},
        "completion/length_mean": float(lengths.mean()),
        "completion/length_max": float(lengths.max()),
        "completion/truncated_fraction": float(np.mean([row["finish_reason"] == "length" for row in rows])),
        "rollout/trained_fraction": float(np.mean([row["trained"] for row in rows])),
    }


def reward_means(sums: Sequence[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """`reward/<function>/<metric>`: the mean over the calls that gave it."""
    names = sorted({name for one in sums for name in one})
    found = {name: [one[name] for one in sums if name in one] for name in names}
    return {f"reward/{name}": sum(t for t, _ in pairs) / sum(n for _, n in pairs) for name, pairs in found.items()}


def sheets(rollouts: Sequence[Rollout], grpo: GRPORun, count: int) -> list[tuple[str, Any]]:
    """Text and picture of one completion of each of this rank's first prompts."""
    own = -(-count // grpo.world.size)
    found = []
    for rollout in rollouts[:: grpo.config.grpo.num_generations][:own]:
        sample = rollout.prompt.sample
        rewards = ", ".join(f"{name} {value:g}" for name, value in rollout.rewards.items())
        reference = "" if sample.answer is None else f"reference: {sample.answer}\n"
        text = (
            f"{question_of(sample)}\ncompletion: {rollout.completion.text}\n{reference}"
            f"reward {rollout.reward:g} ({rewards}), advantage {rollout.advantage:+.2f}"
        )
        found.append((text, contact_sheet(rollout.prompt.media, text)))
    return found
