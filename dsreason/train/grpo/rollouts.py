"""Rollouts: completions with their prompts, rewards and advantages, and the same as the loss takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dsreason.data.chat import EncodedPrompt
from dsreason.data.micro_batches import Exchange
from dsreason.data.types import Batch, EncodedSample
from dsreason.losses.advantages import informative_groups
from dsreason.rewards.scoring import Scores
from dsreason.rollout.protocol import Completion


@dataclass(frozen=True)
class Group:
    """Completions of one prompt with their scores.

    `place` is (rollout, number of the prompt in it over all ranks): the same on any number of ranks. `number` is its
    place among the groups that are trained, None for one that is not.
    """

    place: tuple[int, int]
    prompt: EncodedPrompt
    completions: list[Completion]
    scores: Scores
    number: int | None = None


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt.

    Example: `Rollout(prompt, completion, reward=1.5, rewards={"format": 1.0, "single_choice": 0.5}, advantage=0.7, group=3)`.
    """

    prompt: EncodedPrompt
    completion: Completion
    reward: float
    """The weighted sum."""
    rewards: dict[str, float]
    """By function, unweighted."""
    advantage: float
    group: int | None = 0
    """Number of the trained group, over all ranks; None where dynamic sampling left it out."""


@dataclass(frozen=True)
class FlatRollouts:
    """What the loss needs beside log-probabilities, one entry for each of the `N` completion tokens of a micro-batch."""

    rollout_logprobs: Tensor  # [N] float32, of the engine
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, row of the token in the micro-batch


def to_groups(
    places: Sequence[tuple[int, int]],
    prompts: Sequence[EncodedPrompt],
    completions: Sequence[Completion],
    scores: Scores,
) -> list[Group]:
    """One group a prompt; completions and scores are flat, those of a prompt follow each other."""
    if not prompts:  # a rank without a prompt
        return []
    size = len(completions) // len(prompts)
    return [
        Group(place, prompt, list(completions[i * size : (i + 1) * size]), scores.part(i * size, (i + 1) * size))
        for i, (place, prompt) in enumerate(zip(places, prompts, strict=True))
    ]


def informative(groups: Sequence[Group], tolerance: float) -> list[bool]:
    """Which groups have rewards that differ by more than `tolerance`."""
    if not groups:
        return []
    return informative_groups(rewards_of(groups), tolerance=tolerance).tolist()


def choose(groups: Sequence[Group], kept: Sequence[bool], wanted: int, exchange: Exchange) -> list[Group]:
    """Number the first `wanted` groups that are kept, in the order of their places over all ranks. Collective.

    Where none is kept none is trained.
    """
    own = [(group.place, keep) for group, keep in zip(groups, kept, strict=True)]
    everywhere = sorted(item for part in exchange(own) for item in part)
    places = [place for place, keep in everywhere if keep]
    numbers = {place: number for number, place in enumerate(places[:wanted])}
    return [replace(group, number=numbers.get(group.place)) for group in groups]


def to_rollouts(
    groups: Sequence[Group], advantages_of: Callable[[Tensor], Tensor], exchange: Exchange
) -> list[Rollout]:
    """The completions with their advantages, which `advantages_of` (`[P, G]` → `[P, G]`) has from all ranks' trained groups.

    Collective. The completions of groups that are not trained have advantage 0.
    """
    own = {group.number: group.scores.total.tolist() for group in groups if group.number is not None}
    rewards = {number: row for part in exchange(own) for number, row in part.items()}
    advantages: dict[int | None, list[float]] = {}
    if rewards:
        numbers = sorted(rewards)
        table = advantages_of(torch.tensor([rewards[number] for number in numbers], dtype=torch.float64))
        advantages = dict(zip(numbers, table.tolist(), strict=True))
    return [
        Rollout(
            prompt=group.prompt,
            completion=completion,
            reward=float(group.scores.total[i]),
            rewards={name: float(values[i]) for name, values in group.scores.by_function.items()},
            advantage=advantages[group.number][i] if group.number is not None else 0.0,
            group=group.number,
        )
        for group in groups
        for i, completion in enumerate(group.completions)
    ]


def rewards_of(groups: Sequence[Group]) -> Tensor:
    """`[groups, completions]` float64."""
    return torch.stack([torch.from_numpy(group.scores.total) for group in groups])


def cut_steps(rollouts: Sequence[Rollout], num_groups: int, num_steps: int) -> list[list[Rollout]]:
    """This rank's trained rollouts by optimizer step; which step has a group does not depend on the number of ranks.

    Example: 10 groups over 4 steps → groups 0 to 2, 3 and 4, 5 to 7, 8 and 9.
    """
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for rollout in rollouts:
        if rollout.group is not None:
            steps[rollout.group * num_steps // num_groups].append(rollout)
    return steps


def training_sample(rollout: Rollout, number: int) -> EncodedSample:
    """Prompt and completion, with the completion's tokens trained; `number` becomes the id."""
    prompt, ids = rollout.prompt.encoded, torch.tensor(rollout.completion.ids, dtype=torch.int64)
    trained = torch.cat([torch.zeros_like(prompt.loss_mask), torch.ones(len(ids), dtype=torch.bool)])
    start = prompt.position_ids.max() + 1  # text goes on after the largest of all axes
    positions = (start + torch.arange(len(ids))).expand(3, -1)
    return EncodedSample(
        id=str(number),
        input_ids=torch.cat([prompt.input_ids, ids]),
        loss_mask=trained,
        position_ids=torch.cat([prompt.position_ids, positions], dim=1),
        mm_token_type_ids=torch.cat([prompt.mm_token_type_ids, torch.zeros_like(ids)]),
        mm_kwargs=prompt.mm_kwargs,
    )


def flatten(batch: Batch, rollouts: Sequence[Rollout], device: torch.device) -> FlatRollouts:
    """The rollouts of a micro-batch, whose ids are their numbers, in the order in which the policy gives tokens."""
    chosen = rollouts_of(batch, rollouts)
    lengths = [len(rollout.completion.ids) for rollout in chosen]
    logprobs = np.asarray([logprob for rollout in chosen for logprob in rollout.completion.logprobs], np.float32)
    advantages = np.repeat(np.asarray([rollout.advantage for rollout in chosen], np.float32), lengths)
    sequence = np.repeat(np.arange(len(chosen)), lengths)
    return FlatRollouts(
        rollout_logprobs=torch.from_numpy(logprobs).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        sequence=torch.from_numpy(sequence).to(device),
    )


def rollouts_of(batch: Batch, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those of a micro-batch, without what was put there to keep ranks in step."""
    return [rollouts[int(name)] for name in batch.ids if name]
