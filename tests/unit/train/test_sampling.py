"""Requests of a rollout to the engine, and the completions that are used for training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.prompts import Prompts
from dsreason.data.types import EncodedSample, Sample
from dsreason.job.ranks import World
from dsreason.losses.objective import build_objective
from dsreason.rewards.scoring import CompletionScores
from dsreason.rollout.protocol import Completion, Sampling, make_single_turn
from dsreason.train.grpo import loop, sampling
from dsreason.train.grpo.rollouts import Rollout
from dsreason.train.grpo.sampling import RolloutSampler, SampledRollouts


def prompt(name: str) -> EncodedPrompt:
    nothing = torch.zeros(1)
    return EncodedPrompt(Sample(name, []), EncodedSample(name, nothing, nothing, nothing, nothing, {}), [1], [])


class Engine:
    """An engine that records its requests, and completes every prompt with its name and the number of its stream."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], Sampling, int, list[int]]] = []

    def generate(
        self, prompts: Sequence[EncodedPrompt], settings: Sampling, *, version: int, streams: Sequence[int]
    ) -> list[Completion]:
        self.asked.append(([item.sample.id for item in prompts], settings, version, list(streams)))
        return [
            make_single_turn((5,), f"{item.sample.id} {stream}", (-1.0,), "stop", version)
            for item, stream in zip(prompts, streams, strict=True)
        ]


class Scorer:
    """A scorer that returns the stream's number, or the prompt's number for prompts whose group should have equal rewards."""

    def __init__(self, equal: set[str]) -> None:
        self.equal = equal

    def score(
        self, completions: Sequence[str], samples: Sequence[Sample], completion_ids: Sequence[Sequence[int]]
    ) -> CompletionScores:
        assert list(completion_ids) == [(5,)] * len(completions)
        rewards = [
            0.0 if item.id in self.equal else float(text.split()[1])
            for text, item in zip(completions, samples, strict=True)
        ]
        return CompletionScores(np.array(rewards), {"right": np.array(rewards)})


def make_sampler(
    engine: Engine, batches: Sequence[Prompts], equal: Collection[str] = (), **algorithm: Any
) -> RolloutSampler:
    config = make_config(**algorithm)
    sampler: Any = SimpleNamespace(awake=lambda version: nullcontext(engine), times={})
    watchdog: Any = SimpleNamespace(track_phase=lambda name: nullcontext())
    scorer: Any = Scorer(set(equal))
    world = World(0, 0, 1, torch.device("cpu"))
    return RolloutSampler(
        config, build_objective(config.grpo), iter(batches), sampler, scorer, world, watchdog, [].extend, next_batch=0
    )


def make_config(**algorithm: Any) -> GRPOConfig:
    return GRPOConfig.model_validate(
        {
            "reward": {"functions": {"format": 1.0}},
            "rollout": {"temperature": 0.7, "max_completion_length": 9},
            "grpo": {"preset": "dr_grpo", "num_generations": 2, "prompts_per_step": 2, **algorithm},
            "train": {"seed": 11},
        }
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sampling, loop):
        monkeypatch.setattr(module, "gather_objects", lambda value: [value])
    monkeypatch.setattr(sampling, "reduce_sum", float)
    monkeypatch.setattr(sampling, "share_errors", nullcontext)


def test_completion_streams_follow_prompt_position() -> None:
    # Rank 1 of 2 has the prompts 1 and 3 of the batch.
    engine = Engine()
    batch = Prompts(6, [prompt("b"), prompt("d")], [1, 3], [])
    groups = make_sampler(engine, []).sample_groups(engine, batch, 4, SampledRollouts())  # type: ignore[arg-type]
    ((names, settings, version, streams),) = engine.asked
    assert (names, streams, version) == (["b", "b", "d", "d"], [2, 3, 6, 7], 4)
    assert (settings.temperature, settings.max_completion_length) == (0.7, 9)
    assert [[item.place for item in group] for group in groups] == [[(6, 1)] * 2, [(6, 3)] * 2]
    assert [[item.completion.text for item in group] for group in groups] == [["b 2", "b 3"], ["d 6", "d 7"]]


def test_seed_differs_between_prompt_batches() -> None:
    engine = Engine()
    sampler = make_sampler(engine, [])
    for number in (6, 7, 6):
        batch = Prompts(number, [prompt("a")], [0], [])
        sampler.sample_groups(engine, batch, 4, SampledRollouts())  # type: ignore[arg-type]
    first, other, second = (settings.seed for _, settings, *_ in engine.asked)
    assert first == second != other


def test_groups_of_equal_rewards_are_replaced() -> None:
    engine = Engine()
    batches = [
        Prompts(number, [prompt(name), prompt(f"{name}{name}")], [0, 1], []) for number, name in enumerate("abc")
    ]
    sampler = make_sampler(engine, batches, equal={"a", "bb"}, dynamic_sampling=True)
    sampled = sampler.sample(4)
    assert [
        (rollout.place, rollout.group, rollout.advantage) for rollout in sampled.rollouts if rollout.group is not None
    ] == [
        ((0, 1), 0, -0.5),
        ((0, 1), 0, 0.5),
        ((1, 0), 1, -0.5),
        ((1, 0), 1, 0.5),
    ]
    assert len(sampled.rollouts) == 8
    assert {place: item.sample.id for place, item in sampled.prompts.items()} == {
        (0, 0): "a",
        (0, 1): "aa",
        (1, 0): "b",
        (1, 1): "bb",
    }
    assert sampler.next_batch == 2


def test_sequence_parallel_ranks_split_their_prompts() -> None:
    for rank, requested in ((0, ["a", "a", "c", "c"]), (1, ["b", "b"])):
        engine = Engine()
        sampler = make_sampler(engine, [Prompts(0, [prompt(name) for name in "abc"], [0, 2, 4], [])])
        sampler.world = World(rank, rank, 4, torch.device("cpu"), ranks_per_row=2)
        sampled = sampler.sample(4)
        assert [names for names, *_ in engine.asked] == [requested]
        assert [rollout.prompt.sample.id for rollout in sampled.rollouts] == requested
        assert list(sampled.prompts) == [(0, 0), (0, 2), (0, 4)]


def test_sampling_stops_at_refill_limit() -> None:
    engine = Engine()
    batches = [Prompts(number, [prompt("a"), prompt("b")], [0, 1], [f"row {number}"]) for number in range(9)]
    sampler, skipped = (
        make_sampler(engine, batches, equal={"a", "b"}, dynamic_sampling=True, max_refills=2),
        list[str](),
    )
    sampler.count_skipped = skipped.extend
    sampled = sampler.sample(4)
    assert {rollout.group for rollout in sampled.rollouts} == {None}
    assert (len(engine.asked), sampler.next_batch, len(skipped)) == (3, 3, 3)


@pytest.mark.parametrize(("overlong_filter", "trained"), [(True, ["stop"]), (False, ["stop", "length"])])
def test_truncated_completion_is_skipped_with_overlong_filter(
    monkeypatch: pytest.MonkeyPatch, overlong_filter: bool, trained: list[str]
) -> None:
    config = make_config(overlong_filter=overlong_filter)
    monkeypatch.setattr(loop, "split_into_micro_batches", lambda rollouts, *_: rollouts)
    rollouts = [
        Rollout(prompt("a"), make_single_turn((5,), "", (-1.0,), reason, 4), 0.0, {}, group=0)  # type: ignore[arg-type]
        for reason in ("stop", "length")
    ]
    world, encoder = World(0, 0, 1, torch.device("cpu")), None
    steps: Any = loop.cut_into_steps(rollouts, build_objective(config.grpo), config, encoder, world)  # type: ignore[arg-type]
    assert [[item.completion.finish_reason for item in step] for step in steps] == [trained]
