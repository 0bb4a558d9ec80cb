"""Rollouts: completions with their prompts, rewards and advantages, and their conversion to inputs of the loss."""

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
from dsreason.rewards.scoring import CompletionScores
from dsreason.rollout.protocol import Completion, CompletionSegment

PromptPlace = tuple[int, int]
"""(Batch of prompts, index of the prompt in it over all ranks); does not depend on the number of ranks."""


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt.

    Example: `Rollout(prompt, completion, reward=1.5, rewards={"format": 1.0, "single_choice": 0.5}, advantage=0.7, group=3)`.
    """

    prompt: EncodedPrompt
    completion: Completion
    reward: float
    """Weighted sum of `rewards`."""
    rewards: dict[str, float]
    """Reward function → unweighted reward."""
    advantage: float = 0.0
    group: int | None = 0
    """Index of the trained group over all ranks; None if it is not trained."""
    place: PromptPlace = (0, 0)
    """Position of the prompt."""


Group = list[Rollout]
"""The rollouts of one prompt."""


@dataclass(frozen=True)
class RolloutSample(EncodedSample):
    """Prompt and completion of a rollout, encoded for the model."""

    rollout: Rollout


@dataclass(frozen=True)
class RolloutMicroBatch:
    """Rollouts that go through one forward.

    The rollouts are in the order of their tokens in `batch`, those of a prompt together. A batch that only keeps the ranks
    in step has none.
    """

    batch: Batch
    rollouts: list[Rollout]
    old_logprobs: Tensor | None = None
    """`[N]` under the policy that sampled; None if the policy has not changed since."""
    ref_logprobs: Tensor | None = None
    """`[N]` under the reference; None without a KL term."""
    teacher_logprobs: Tensor | None = None
    """`[N]` under the teacher; None without a teacher."""


@dataclass(frozen=True)
class FlatRollouts:
    """Inputs of the loss besides the log-probabilities, one entry per sampled token of a micro-batch (`N` in total)."""

    rollout_logprobs: Tensor  # [N] float32, from the rollout engine
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, index of the token's rollout in the micro-batch


def make_rollouts(
    prompts: Sequence[EncodedPrompt],
    places: Sequence[PromptPlace],
    completions: Sequence[Completion],
    scores: CompletionScores,
) -> list[Rollout]:
    """Build rollouts from scored completions, without advantages and not yet selected for training."""
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


def is_informative(group: Group, tolerance: float) -> bool:
    """Return whether dynamic sampling keeps the group: its rewards differ by more than `tolerance` (DAPO, 2503.14476).

    Continuous rewards are never exactly equal, and normalisation by the std would amplify their noise. The range is
    compared instead of the std, because rounding keeps the std from being exactly 0.
    """
    rewards = [rollout.reward for rollout in group]
    return max(rewards) - min(rewards) > tolerance


def add_advantages(
    groups: Sequence[Group],
    usable: Sequence[bool],
    num_trained: int,
    compute_advantages: Callable[[Tensor], Tensor],
    exchange: Exchange,
) -> list[Rollout]:
    """Add group indices and advantages to the rollouts of the first usable groups of all ranks. Collective.

    At most `num_trained` groups are used. They are numbered in the order of their places, and `compute_advantages`
    (`[P, G]` → `[P, G]`) gets all of them. The rollouts of the other groups are not trained and have advantage 0.
    """
    local_rewards = [
        (group[0].place, [rollout.reward for rollout in group])
        for group, keep in zip(groups, usable, strict=True)
        if keep
    ]
    trained = sorted(item for part in exchange(local_rewards) for item in part)[:num_trained]
    trained_groups: dict[PromptPlace, tuple[int, list[float]]] = {}
    if trained:
        table = compute_advantages(torch.tensor([rewards for _, rewards in trained], dtype=torch.float64))
        trained_groups = {place: (number, table[number].tolist()) for number, (place, _) in enumerate(trained)}
    updated = []
    for group in groups:
        number, advantages = trained_groups.get(group[0].place) or (None, [0.0] * len(group))
        updated += [replace(rollout, advantage=a, group=number) for rollout, a in zip(group, advantages, strict=True)]
    return updated


def join_group(
    rollouts: Sequence[Rollout], prompts: Mapping[PromptPlace, EncodedPrompt], exchange: Exchange
) -> list[Rollout]:
    """Gather the trained rollouts of all ranks that compute this rank's rows, in the order of their prompts. Collective.

    Args:
        prompts: the prompts of all of these ranks. Each rank has them, so they are not exchanged.
        exchange: gathers objects from these ranks.
    """
    local_rollouts = [
        {name: value for name, value in vars(rollout).items() if name != "prompt"}
        for rollout in rollouts
        if rollout.group is not None
    ]
    joined = sorted(
        (rollout_fields for part in exchange(local_rollouts) for rollout_fields in part), key=itemgetter("place")
    )
    return [Rollout(prompt=prompts[fields["place"]], **fields) for fields in joined]


def split_into_steps(rollouts: Sequence[Rollout], num_groups: int, num_steps: int) -> list[list[Rollout]]:
    """Split this rank's trained rollouts into optimizer steps; the split does not depend on the number of ranks.

    Example: 10 groups over 4 steps → groups 0 to 2, 3 and 4, 5 to 7, 8 and 9.
    """
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for rollout in rollouts:
        if rollout.group is not None:
            steps[rollout.group * num_steps // num_groups].append(rollout)
    return steps


def build_training_sample(rollout: Rollout) -> RolloutSample:
    """Build the training sample of a rollout: the completion after its prompt, with the sampled tokens trained."""
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
    """Encode the tokens of a segment with positions that start at 0; sampled tokens are text."""
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
    """Flatten the sampled tokens of a micro-batch's rollouts, in the order of the policy's log-probabilities."""
    by_rollout = [rollout.completion.logprobs for rollout in rollouts]
    lengths = torch.tensor(list(map(len, by_rollout)), dtype=torch.int64)
    logprobs = [logprob for part in by_rollout for logprob in part]
    advantages = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32)
    return FlatRollouts(
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32).to(device),
        advantages=advantages.repeat_interleave(lengths).to(device),
        sequence=torch.arange(len(rollouts)).repeat_interleave(lengths).to(device),
    )
