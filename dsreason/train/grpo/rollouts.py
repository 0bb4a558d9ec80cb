"""Rollouts: completions with their prompts, rewards and advantages, and the same as the loss takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

PromptPlace = tuple[int, int]
"""(Batch of prompts, number of the prompt in it over all ranks): the same on any number of ranks."""


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
    advantage: float = 0.0
    group: int | None = 0
    """Number of the trained group, over all ranks; None where it is not trained."""
    place: PromptPlace = (0, 0)
    """Of the prompt."""


Group = list[Rollout]
"""The rollouts of one prompt."""


@dataclass(frozen=True)
class RolloutSample(EncodedSample):
    """Prompt and completion of a rollout as the model reads them."""

    rollout: Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Rollouts that go through one forward.

    The rollouts are those of the first rows of `batch`, in their order; there are fewer than rows where a row only keeps
    the ranks in step.
    """

    batch: Batch
    rollouts: list[Rollout]
    old_logprobs: Tensor | None = None
    """`[N]`, of the policy that sampled; None: the policy is still the same."""
    ref_logprobs: Tensor | None = None
    """`[N]`, of the reference; None where there is no KL."""


@dataclass(frozen=True)
class FlatRollouts:
    """What the loss needs beside log-probabilities, one entry for each of the `N` completion tokens of a micro-batch."""

    rollout_logprobs: Tensor  # [N] float32, of the engine
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, row of the token in the micro-batch


def make_rollouts(
    prompts: Sequence[EncodedPrompt], places: Sequence[PromptPlace], completions: Sequence[Completion], scores: Scores
) -> list[Rollout]:
    """The rollouts as they are sampled: without advantages, and not chosen for training yet."""
    return [
        Rollout(
            prompt=prompt,
            completion=completion,
            reward=float(scores.total[i]),
            rewards={name: float(values[i]) for name, values in scores.by_function.items()},
            group=None,
            place=place,
        )
        for i, (prompt, place, completion) in enumerate(zip(prompts, places, completions, strict=True))
    ]


def informative(groups: Sequence[Group], tolerance: float) -> list[bool]:
    """Which groups have rewards that differ by more than `tolerance`."""
    if not groups:
        return []
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    return informative_groups(rewards, tolerance=tolerance).tolist()


def number_groups(
    groups: Sequence[Group], kept: Sequence[bool], wanted: int, exchange: Exchange
) -> dict[PromptPlace, int]:
    """Numbers for the first `wanted` groups that are kept, in the order of their places over all ranks. Collective.

    Where none is kept none is trained.
    """
    own = [(group[0].place, keep) for group, keep in zip(groups, kept, strict=True)]
    everywhere = sorted(item for part in exchange(own) for item in part)
    places = [place for place, keep in everywhere if keep]
    return {place: number for number, place in enumerate(places[:wanted])}


def with_advantages(
    groups: Sequence[Group],
    numbers: Mapping[PromptPlace, int],
    advantages_of: Callable[[Tensor], Tensor],
    exchange: Exchange,
) -> list[Rollout]:
    """The rollouts with their advantages, which `advantages_of` (`[P, G]` → `[P, G]`) has from all ranks' trained groups.

    Collective. `numbers` are those of the trained groups. The rollouts of the others have advantage 0.
    """
    own = {
        numbers[group[0].place]: [rollout.reward for rollout in group] for group in groups if group[0].place in numbers
    }
    rewards = dict(sorted(pair for part in exchange(own) for pair in part.items()))
    advantages: dict[int, list[float]] = {}
    if rewards:
        table = advantages_of(torch.tensor(list(rewards.values()), dtype=torch.float64))
        advantages = dict(zip(rewards, table.tolist(), strict=True))
    found = []
    for group in groups:
        number = numbers.get(group[0].place)
        values = [0.0] * len(group) if number is None else advantages[number]
        found += [replace(rollout, advantage=value, group=number) for rollout, value in zip(group, values, strict=True)]
    return found


def split_into_steps(rollouts: Sequence[Rollout], num_groups: int, num_steps: int) -> list[list[Rollout]]:
    """This rank's trained rollouts by optimizer step; which step has a group does not depend on the number of ranks.

    Example: 10 groups over 4 steps → groups 0 to 2, 3 and 4, 5 to 7, 8 and 9.
    """
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for rollout in rollouts:
        if rollout.group is not None:
            steps[rollout.group * num_steps // num_groups].append(rollout)
    return steps


def training_sample(rollout: Rollout) -> RolloutSample:
    """Prompt and completion, with the completion's tokens trained."""
    prompt, ids = rollout.prompt.encoded, torch.tensor(rollout.completion.ids, dtype=torch.int64)
    trained = torch.cat([torch.zeros_like(prompt.loss_mask), torch.ones(len(ids), dtype=torch.bool)])
    start = prompt.position_ids.max() + 1  # text goes on after the largest of all axes
    positions = (start + torch.arange(len(ids))).expand(3, -1)
    return RolloutSample(
        id=prompt.id,
        input_ids=torch.cat([prompt.input_ids, ids]),
        loss_mask=trained,
        position_ids=torch.cat([prompt.position_ids, positions], dim=1),
        mm_token_type_ids=torch.cat([prompt.mm_token_type_ids, torch.zeros_like(ids)]),
        mm_kwargs=prompt.mm_kwargs,
        rollout=rollout,
    )


def flatten(rollouts: Sequence[Rollout], device: torch.device) -> FlatRollouts:
    """The rollouts of a micro-batch in the order in which the policy gives tokens."""
    lengths = [len(rollout.completion.ids) for rollout in rollouts]
    logprobs = np.asarray([logprob for rollout in rollouts for logprob in rollout.completion.logprobs], np.float32)
    advantages = np.repeat(np.asarray([rollout.advantage for rollout in rollouts], np.float32), lengths)
    sequence = np.repeat(np.arange(len(rollouts)), lengths)
    return FlatRollouts(
        rollout_logprobs=torch.from_numpy(logprobs).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        sequence=torch.from_numpy(sequence).to(device),
    )
