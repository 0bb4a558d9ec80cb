"""Rollout sampling: read prompts, generate completions with the current policy, and add rewards and advantages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsreason.config.schema_grpo import GRPOConfig, RolloutConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.prompts import Prompts
from dsreason.job.ranks import World, gather_objects, reduce_sum, share_errors
from dsreason.job.watchdog import Watchdog
from dsreason.losses.objective import Objective
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.protocol import RolloutEngine, Sampling
from dsreason.train.common.answers import score_completions
from dsreason.train.common.sampler import Sampler
from dsreason.train.grpo.rollouts import Group, PromptPlace, Rollout, add_advantages, is_informative, make_rollouts


@dataclass
class SampledRollouts:
    """This rank's scored completions, with metrics about how they were sampled."""

    rollouts: list[Rollout] = field(default_factory=list)
    prompts: dict[PromptPlace, EncodedPrompt] = field(default_factory=dict)
    """Place → prompt, for the prompts of all ranks that compute the same rows as this rank. Each of these ranks samples
    completions for some of the prompts."""
    metrics: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("time/data", "time/generate", "time/reward", "rollout/tokens"), 0.0)
    )
    reward_sums: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    """Additional metrics from this rank's reward functions, one dict per scored batch (`CompletionScores.metric_sums`)."""


@dataclass
class RolloutSampler:
    """A sampler that reads the next prompts, generates completions for them, and scores the completions."""

    config: GRPOConfig
    objective: Objective
    loader: Iterator[Prompts]
    sampler: Sampler
    scorer: Scorer
    world: World
    watchdog: Watchdog
    count_skipped: Callable[[Sequence[str]], None]
    """Callback that receives one message per skipped row."""
    next_batch: int
    """Index of the prompt batch to sample next."""

    def sample(self, step: int) -> SampledRollouts:
        """Sample completions from the policy as it is after optimizer step `step`. Collective.

        With dynamic sampling, up to `grpo.max_refills` more prompt batches are sampled until there are enough groups to
        train on.
        """
        config, num_prompts, dynamic = (
            self.config.grpo,
            self.config.grpo.prompts_per_step,
            self.objective.dynamic_sampling,
        )
        sampled, groups = SampledRollouts(), list[Group]()
        with self.sampler.awake(version=step) as engine:
            for _ in range(1 + config.max_refills if dynamic else 1):
                prompts = self.read_next_prompts(sampled)
                groups += self.sample_groups(engine, prompts.part(self.world.row_part), step, sampled)
                usable = [not dynamic or is_informative(group, config.dynamic_tolerance) for group in groups]
                if reduce_sum(sum(usable)) >= num_prompts:
                    break
        sampled.metrics |= self.sampler.times
        sampled.metrics["rollout/tokens_per_second"] = (
            sampled.metrics["rollout/tokens"] / sampled.metrics["time/generate"]
        )
        sampled.rollouts = add_advantages(groups, usable, num_prompts, self.objective.advantages, gather_objects)
        return sampled

    def read_next_prompts(self, sampled: SampledRollouts) -> Prompts:
        """Read this rank's share of the next prompt batch and add the prompts to `sampled`."""
        started = time.perf_counter()
        with self.watchdog.track_phase("data"):
            prompts = next(self.loader)
        sampled.metrics["time/data"] += time.perf_counter() - started
        self.count_skipped(prompts.skipped)
        for number, prompt in zip(prompts.numbers, prompts.prompts, strict=True):
            sampled.prompts[prompts.batch, number] = prompt
        self.next_batch = prompts.batch + 1
        return prompts

    def sample_groups(
        self, engine: RolloutEngine, prompts: Prompts, step: int, sampled: SampledRollouts
    ) -> list[Group]:
        """Sample and score `num_generations` completions per prompt, and add their metrics to `sampled`."""
        rollout, size = self.config.rollout, self.config.grpo.num_generations
        seed = int(np.random.SeedSequence((self.config.train.seed, prompts.batch)).generate_state(1)[0])
        sampling = build_sampling(rollout, seed)
        repeated = [prompt for prompt in prompts.prompts for _ in range(size)]
        # Random streams are numbered across all ranks, so the samples do not depend on the number of ranks.
        streams = [number * size + i for number in prompts.numbers for i in range(size)]
        started = time.perf_counter()
        completions = engine.generate(repeated, sampling, version=step, streams=streams)
        sampled.metrics["time/generate"] += time.perf_counter() - started
        sampled.metrics["rollout/tokens"] += sum(completion.num_tokens for completion in completions)

        started = time.perf_counter()
        with self.watchdog.track_phase("reward"), share_errors():
            scores = score_completions(self.scorer, repeated, completions, sampling)
        sampled.metrics["time/reward"] += time.perf_counter() - started
        sampled.reward_sums.append(scores.metric_sums)
        places = [(prompts.batch, number) for number in prompts.numbers for _ in range(size)]
        rollouts = make_rollouts(repeated, places, completions, scores)
        return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def build_sampling(rollout: RolloutConfig, seed: int) -> Sampling:
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_completion_length=rollout.max_completion_length,
        seed=seed,
    )
