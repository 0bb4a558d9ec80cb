"""One rollout: the next prompts, completions of the present policy, and their rewards and advantages."""

from __future__ import annotations

import time

import numpy as np

from dsreason.data.chat import EncodedPrompt
from dsreason.data.prompts import Prompts
from dsreason.job.ranks import all_sum, gather_objects
from dsreason.rollout.protocol import RolloutEngine, Sampling
from dsreason.train.common.answers import score_completions
from dsreason.train.common.steps import count_skipped
from dsreason.train.grpo.build import GRPORun
from dsreason.train.grpo.rollouts import Group, PromptPlace, Rollout, informative, make_rollouts, with_advantages


def sample(grpo: GRPORun) -> tuple[list[Rollout], dict[PromptPlace, EncodedPrompt]]:
    """Scored completions of the next prompts by the present policy; sampling dynamically, also of the prompts after.

    With them the prompts, by place, of all ranks that compute this rank's rows: each of these ranks samples some of them.
    """
    config, wanted = grpo.config.grpo, grpo.config.grpo.prompts_per_step
    grpo.rollout_metrics = dict.fromkeys(("time/data", "time/generate", "time/reward", "rollout/tokens"), 0.0)
    dynamic = grpo.objective.dynamic_sampling
    groups: list[Group] = []
    found: dict[PromptPlace, EncodedPrompt] = {}
    with grpo.sampler.awake(version=grpo.state.step) as engine:
        for _ in range(1 + config.max_refills if dynamic else 1):
            prompts = next_prompts(grpo)
            found |= {
                (prompts.batch, number): one for number, one in zip(prompts.numbers, prompts.prompts, strict=True)
            }
            groups += sample_groups(grpo, engine, prompts.part(grpo.world.row_part))
            usable = [not dynamic or informative(group, config.dynamic_tolerance) for group in groups]
            if all_sum(sum(usable)) >= wanted:
                break
    metrics = grpo.rollout_metrics | grpo.sampler.times
    metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/generate"]
    grpo.rollout_metrics = metrics
    return with_advantages(groups, usable, wanted, grpo.objective.advantages, gather_objects), found


def next_prompts(grpo: GRPORun) -> Prompts:
    """This rank's share of the next prompts."""
    started = time.perf_counter()
    with grpo.watchdog.phase("data"):
        prompts = next(grpo.prompts)
    grpo.rollout_metrics["time/data"] += time.perf_counter() - started
    count_skipped(grpo, prompts.skipped)
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
    started = time.perf_counter()
    completions = engine.generate(repeated, sampling, version=grpo.state.step, streams=streams)
    grpo.rollout_metrics["time/generate"] += time.perf_counter() - started
    grpo.rollout_metrics["rollout/tokens"] += sum(len(completion.ids) for completion in completions)

    started = time.perf_counter()
    with grpo.watchdog.phase("reward"):
        scores = score_completions(grpo.scorer, repeated, completions, sampling)
    grpo.rollout_metrics["time/reward"] += time.perf_counter() - started
    grpo.reward_sums.append(scores.metric_sums)
    places = [(prompts.batch, number) for number in prompts.numbers for _ in range(size)]
    rollouts = make_rollouts(repeated, places, completions, scores)
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
