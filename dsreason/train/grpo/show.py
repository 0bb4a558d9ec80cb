"""Reports on rollouts: a file with all completions, metrics, and a few examples with their media."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.messages import list_media_paths
from dsreason.files.step_names import format_step
from dsreason.job.ranks import World, gather_objects
from dsreason.monitor.metrics import Metrics
from dsreason.train.common.answers import (
    get_data_source,
    get_modality,
    get_question,
    summarise_rewards,
    write_rows,
)
from dsreason.train.common.contact_sheet import draw_contact_sheet
from dsreason.train.grpo.reward_counts import RolloutCounts, count_rewards
from dsreason.train.grpo.rollouts import Rollout
from dsreason.train.grpo.sampling import SampledRollouts


def show_rollouts(
    sampled: SampledRollouts,
    step: int,
    config: GRPOConfig,
    *,
    tokenizer: Any,
    world: World,
    output_dir: Path,
    metrics: Metrics,
) -> tuple[dict[str, float], RolloutCounts]:
    """Write `rollouts/step_N.jsonl` and periodically log example completions, both only on rank 0. Collective.

    Returns:
        The rollout's metrics and its `RolloutCounts`, both over all ranks.
    """
    every = config.rollout.show_every
    is_due = every > 0 and step % every < config.grpo.optimizer_steps_per_rollout
    local_rows = [describe(rollout, tokenizer) for rollout in sampled.rollouts]
    sheets = draw_contact_sheets(sampled.rollouts, config, world.size) if is_due else []
    parts = gather_objects((local_rows, sheets, sampled.reward_sums))
    rows = [row for part, *_ in parts for row in part]
    means = summarise(rows, config.grpo.num_generations)
    reward_sums = [sums for *_, part in parts for sums in part]
    means |= compute_reward_means(reward_sums)
    counts = count_rewards(rows, reward_sums, config)
    if counts.by_function:
        means["rollout/groups_without_signal"] = float(counts.groups_without_signal)
    if world.is_main:
        write_rows(output_dir / "rollouts" / f"{format_step(step)}.jsonl", rows)
        if is_due and rows:
            advantages = np.array([row["advantage"] for row in rows if row["trained"]])
            if len(advantages):
                metrics.log_histogram(step, "rollout/advantage", advantages)
            for name in rows[0]["rewards"]:
                values = [row["rewards"][name] for row in rows if row["rewards"][name] is not None]
                if values:
                    metrics.log_histogram(step, f"reward/{name}", np.array(values))
            examples = [example for _, part, _ in parts for example in part]
            metrics.log_text(step, "rollout/completions", "\n\n".join(text for text, _ in examples))
            metrics.log_images(step, "rollout/completions", [sheet for _, sheet in examples])
    return sampled.metrics | means, counts


def describe(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    sample, completion = rollout.prompt.sample, rollout.completion
    return {
        "id": sample.id,
        "modality": get_modality(sample),
        "data_source": get_data_source(sample),
        "version": completion.version,
        "prompt": tokenizer.decode(rollout.prompt.prompt_ids),
        "completion": completion.text,
        "length": completion.num_tokens,
        "finish_reason": completion.finish_reason,
        "reference": sample.answer,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "advantage": rollout.advantage,
        "trained": rollout.group is not None,
        "media": list_media_paths(sample.messages),
    }


def summarise(rows: Sequence[dict[str, Any]], num_generations: int) -> dict[str, float]:
    """Compute the metrics of a rollout from its rows, in which the completions of a prompt must be adjacent.

    The metrics cover all sampled completions, including those discarded by dynamic sampling or the overlong filter.
    Missing rewards (None) are excluded from means and standard deviations.
    """
    if not rows:  # all rows were skipped
        return {}
    rewards = np.array([row["reward"] for row in rows], dtype=np.float64).reshape(-1, num_generations)
    lengths = np.array([row["length"] for row in rows], dtype=np.float64)
    spreads = [np.ptp(group[~np.isnan(group)]) if not np.isnan(group).all() else 0.0 for group in rewards]
    named_rewards = [{"": row["reward"], **row["rewards"]} for row in rows]
    return {
        "reward/zero_std_fraction": float(np.mean([spread == 0 for spread in spreads])),
        **summarise_rewards(named_rewards, [row["data_source"] for row in rows], "reward"),
        **compute_stds(named_rewards),
        "completion/length_mean": float(lengths.mean()),
        "completion/length_max": float(lengths.max()),
        "completion/truncated_fraction": float(np.mean([row["finish_reason"] == "length" for row in rows])),
        "rollout/trained_fraction": float(np.mean([row["trained"] for row in rows])),
    }


def compute_stds(rewards: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """Compute `reward/std` for the weighted sum (whose key is ""), and `reward/<function>/std`; see `summarise_rewards`."""
    by_name = {
        name: [value for completion_rewards in rewards if (value := completion_rewards[name]) is not None]
        for name in rewards[0]
    }
    return {
        f"reward/{name}/std" if name else "reward/std": float(np.std(values))
        for name, values in by_name.items()
        if values
    }


def compute_reward_means(sums: Sequence[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Compute `reward/<function>/<metric>` for each metric, as the mean over the calls that returned it."""
    names = sorted({name for rank_sums in sums for name in rank_sums})
    values_by_name = {name: [rank_sums[name] for rank_sums in sums if name in rank_sums] for name in names}
    return {
        f"reward/{name}": sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        for name, pairs in values_by_name.items()
    }


def draw_contact_sheets(rollouts: Sequence[Rollout], config: GRPOConfig, world_size: int) -> list[tuple[str, Any]]:
    """Return the text and the contact sheet for one completion of each of this rank's first prompts.

    The number of prompts per rank is `rollout.show` divided by the number of ranks, rounded up.
    """
    num_local, sheets = -(-config.rollout.show // world_size), []
    for rollout in rollouts[:: config.grpo.num_generations][:num_local]:
        sample = rollout.prompt.sample
        rewards = ", ".join(f"{name} {format_reward(value)}" for name, value in rollout.rewards.items())
        reference = "" if sample.answer is None else f"reference: {sample.answer}\n"
        text = (
            f"{get_question(sample)}\ncompletion: {rollout.completion.text}\n{reference}"
            f"reward {format_reward(rollout.reward)} ({rewards}), advantage {rollout.advantage:+.2f}"
        )
        sheets.append((text, draw_contact_sheet(rollout.prompt.media, text)))
    return sheets


def format_reward(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
