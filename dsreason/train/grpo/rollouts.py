"""Rollouts: completions with their prompts, rewards and advantages, and the same as the loss takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import join_media
from dsreason.data.micro_batches import Exchange
from dsreason.data.types import Batch, EncodedSample
from dsreason.rewards.scoring import Scores
from dsreason.rollout.protocol import Completion, CompletionSegment

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
    """Number of the trained group, over all ranks; None if it is not trained."""
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

    The rollouts are in the order in which `batch` has their tokens, those of one prompt together; there is none in a batch
    that only keeps the ranks in step.
    """

    batch: Batch
    rollouts: list[Rollout]
    old_logprobs: Tensor | None = None
    """`[N]`, of the policy that sampled; None: the policy is still the same."""
    ref_logprobs: Tensor | None = None
    """`[N]`, of the reference; None if there is no KL."""
    teacher_logprobs: Tensor | None = None
    """`[N]`; None if there is no teacher."""


@dataclass(frozen=True)
class FlatRollouts:
    """What the loss needs beside log-probabilities, one entry for each of the `N` sampled tokens of a micro-batch."""

    rollout_logprobs: Tensor  # [N] float32, of the rollout engine
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, number of the token's rollout in the micro-batch


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


def informative(group: Group, tolerance: float) -> bool:
    """Return whether dynamic sampling keeps the group: its rewards differ by more than `tolerance` (DAPO, 2503.14476).

    Continuous rewards are never equal to the last bit, and the normalisation by std would blow up their noise. The span is
    compared and not the std, which rounding keeps from 0.
    """
    rewards = [rollout.reward for rollout in group]
    return max(rewards) - min(rewards) > tolerance


def with_advantages(
    groups: Sequence[Group],
    usable: Sequence[bool],
    wanted: int,
    advantages_of: Callable[[Tensor], Tensor],
    exchange: Exchange,
) -> list[Rollout]:
    """The rollouts, those of the first `wanted` usable groups of all ranks with their numbers and advantages. Collective.

    The groups are numbered in the order of their places, and `advantages_of` (`[P, G]` → `[P, G]`) gets all of them. The
    rollouts of the others are not trained and have advantage 0.
    """
    own_rewards = [
        (group[0].place, [rollout.reward for rollout in group])
        for group, keep in zip(groups, usable, strict=True)
        if keep
    ]
    trained = sorted(item for part in exchange(own_rewards) for item in part)[:wanted]
    trained_groups: dict[PromptPlace, tuple[int, list[float]]] = {}
    if trained:
        table = advantages_of(torch.tensor([rewards for _, rewards in trained], dtype=torch.float64))
        trained_groups = {place: (number, table[number].tolist()) for number, (place, _) in enumerate(trained)}
    advantaged = []
    for group in groups:
        number, advantages = trained_groups.get(group[0].place) or (None, [0.0] * len(group))
        advantaged += [
            replace(rollout, advantage=a, group=number) for rollout, a in zip(group, advantages, strict=True)
        ]
    return advantaged


def join_group(
    rollouts: Sequence[Rollout], prompts: Mapping[PromptPlace, EncodedPrompt], exchange: Exchange
) -> list[Rollout]:
    """The trained rollouts of all ranks that compute this rank's rows, in the order of their prompts. Collective.

    Args:
        prompts: all of these ranks'. Each has them, so that only what belongs to the completions is exchanged.
        exchange: among these ranks.
    """
    own_rollouts = [
        {name: value for name, value in vars(rollout).items() if name != "prompt"}
        for rollout in rollouts
        if rollout.group is not None
    ]
    joined = sorted(
        (rollout_fields for part in exchange(own_rollouts) for rollout_fields in part), key=itemgetter("place")
    )
    return [Rollout(prompt=prompts[fields["place"]], **fields) for fields in joined]


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
    """The completion as what follows its prompt; its sampled tokens are trained."""
    prompt, segments = rollout.prompt.encoded, list(map(encode_segment, rollout.completion.segments))
    positions, start = [], prompt.position_ids.max() + 1  # a segment begins after the largest position on any axis
    for segment in segments:
        positions.append(start + segment.position_ids)
        start = positions[-1].max() + 1 if len(segment) else start
    return RolloutSample(
        id=prompt.id,
        input_ids=torch.cat([segment.input_ids for segment in segments]),
        loss_mask=torch.tensor(rollout.completion.sampled, dtype=torch.bool),
        position_ids=torch.cat(positions, dim=1),
        mm_token_type_ids=torch.cat([segment.mm_token_type_ids for segment in segments]),
        mm_kwargs=join_media([segment.mm_kwargs for segment in segments]),
        parent=prompt,
        rollout=rollout,
    )


def encode_segment(segment: CompletionSegment) -> EncodedSample:
    """The tokens of a segment with positions that begin at 0; tokens that were sampled are text."""
    if segment.encoded is not None:
        return segment.encoded
    ids = torch.tensor(segment.ids, dtype=torch.int64)
    return EncodedSample(
        id="",
        input_ids=ids,
        loss_mask=torch.full_like(ids, segment.logprobs is not None, dtype=torch.bool),
        position_ids=torch.arange(len(ids)).expand(3, -1),
        mm_token_type_ids=torch.zeros_like(ids),
        mm_kwargs={},
    )


def flatten(rollouts: Sequence[Rollout], device: torch.device) -> FlatRollouts:
    """The sampled tokens of a micro-batch's rollouts, in the order in which the policy gives log-probabilities."""
    by_rollout = [rollout.completion.logprobs for rollout in rollouts]
    lengths = torch.tensor(list(map(len, by_rollout)), dtype=torch.int64)
    logprobs = [logprob for part in by_rollout for logprob in part]
    advantages = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32)
    return FlatRollouts(
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32).to(device),
        advantages=advantages.repeat_interleave(lengths).to(device),
        sequence=torch.arange(len(rollouts)).repeat_interleave(lengths).to(device),
    )
