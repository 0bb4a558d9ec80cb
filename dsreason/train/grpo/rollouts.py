"""Rollouts (completions with their prompts, rewards and advantages) and their conversion to loss inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import join_media
from dsreason.data.micro_batches import Exchange
from dsreason.data.types import Batch, EncodedSample
from dsreason.rewards.scoring import CompletionScores, to_optional
from dsreason.rollout.protocol import Completion, CompletionSegment

PromptPlace = tuple[int, int]
"""(Index of the prompt batch, index of the prompt within that batch over all ranks); independent of the number of ranks."""


@dataclass(frozen=True)
class Rollout:
    """A prompt and a completion of it, with the completion's rewards and advantage.

    Example: `Rollout(prompt, completion, reward=1.5, rewards={"format": 1.0, "single_choice": 0.5}, advantage=0.7, group=3)`.
    """

    prompt: EncodedPrompt
    completion: Completion
    reward: float | None
    """Weighted sum of `rewards`; None if no function applies to the sample."""
    rewards: dict[str, float | None]
    """Name of the reward function → unweighted reward; None if the function does not apply to the sample."""
    advantage: float = 0.0
    group: int | None = 0
    """Index of the rollout's group among the groups that are trained on, over all ranks; None if it is not among them."""
    place: PromptPlace = (0, 0)
    """Index of the prompt batch, and index of the prompt within that batch."""


Group = list[Rollout]
"""The rollouts for one prompt."""


@dataclass(frozen=True)
class RolloutSample(EncodedSample):
    """A rollout's prompt and completion, encoded for the model."""

    rollout: Rollout


@dataclass(frozen=True)
class RolloutMicroBatch:
    """Rollouts that share one forward pass.

    The rollouts are in the order of their tokens in `batch`; rollouts for the same prompt are adjacent. `rollouts` is
    empty for a dummy batch, which exists only so that all ranks run the same number of forward passes.
    """

    batch: Batch
    rollouts: list[Rollout]
    old_logprobs: Tensor | None = None
    """`[N]` log-probabilities under the policy that sampled the tokens; None if the policy has not been updated since
    then."""
    ref_logprobs: Tensor | None = None
    """`[N]` log-probabilities under the reference; None if there is no KL term."""
    teacher_logprobs: Tensor | None = None
    """`[N]` log-probabilities under the teacher; None if there is no teacher."""


@dataclass(frozen=True)
class FlatRollouts:
    """Loss inputs from the rollouts in a micro-batch, with one element per sampled token (`N` in total)."""

    rollout_logprobs: Tensor  # [N] float32, log-probabilities from the rollout engine
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, index of the token's rollout in the micro-batch


def make_rollouts(
    prompts: Sequence[EncodedPrompt],
    places: Sequence[PromptPlace],
    completions: Sequence[Completion],
    scores: CompletionScores,
) -> list[Rollout]:
    """Build rollouts from scored completions; `add_advantages` sets their groups and advantages later."""
    return [
        Rollout(
            prompt=prompt,
            completion=completion,
            reward=to_optional(scores.total[i]),
            rewards={name: to_optional(values[i]) for name, values in scores.by_function.items()},
            group=None,
            place=place,
        )
        for i, (prompt, place, completion) in enumerate(zip(prompts, places, completions, strict=True))
    ]


def is_informative(group: Group, tolerance: float) -> bool:
    """Return whether dynamic sampling keeps the group, whose rewards must differ by more than `tolerance` (DAPO, 2503.14476).

    A tolerance is needed because continuous rewards are rarely exactly equal, and dividing by their std would amplify the
    noise. The tolerance applies to the range rather than the std, because rounding errors can keep the std from being
    exactly 0. Rollouts without a reward are ignored.
    """
    rewards = [rollout.reward for rollout in group if rollout.reward is not None]
    return max(rewards, default=0.0) - min(rewards, default=0.0) > tolerance


def add_advantages(
    groups: Sequence[Group],
    usable: Sequence[bool],
    num_trained: int,
    compute_advantages: Callable[[Tensor], Tensor],
    exchange: Exchange,
) -> list[Rollout]:
    """Return this rank's rollouts with their group indices and advantages. Collective.

    The policy is trained on the first `num_trained` usable groups over all ranks. These groups are numbered in the order of
    their prompts. `compute_advantages` (`[P, G]` → `[P, G]`) gets the rewards of all of them at once, with NaN for each
    rollout without a reward. Rollouts in all other groups get the group index None and an advantage of 0.
    """
    local_rewards = [
        (group[0].place, [math.nan if rollout.reward is None else rollout.reward for rollout in group])
        for group, keep in zip(groups, usable, strict=True)
        if keep
    ]
    trained = sorted((item for part in exchange(local_rewards) for item in part), key=itemgetter(0))[:num_trained]
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
    """Gather the rollouts to train on from all ranks that compute the same rows as this rank, ordered by prompt. Collective.

    Args:
        prompts: the prompts of all these ranks. Each rank already has all of them, so they are not exchanged.
        exchange: function that gathers objects from these ranks.
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
    """Split this rank's rollouts to train on into optimizer steps; the split does not depend on the number of ranks.

    Example: 10 groups in 4 steps → groups 0 to 2, 3 and 4, 5 to 7, and 8 and 9.
    """
    steps: list[list[Rollout]] = [[] for _ in range(num_steps)]
    for rollout in rollouts:
        if rollout.group is not None:
            steps[rollout.group * num_steps // num_groups].append(rollout)
    return steps


def build_training_sample(rollout: Rollout) -> RolloutSample:
    """Build a rollout's training sample: the completion, with its prompt as parent. Only sampled tokens have a loss."""
    prompt, segments = rollout.prompt.encoded, list(map(encode_segment, rollout.completion.segments))
    positions, start = [], prompt.position_ids.max() + 1  # a segment starts after the largest position on any axis
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
    """Encode a segment with positions that start at 0. Sampled tokens are always text."""
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
    """Build the per-token loss inputs for a micro-batch's rollouts, in the order of the policy's log-probabilities."""
    by_rollout = [rollout.completion.logprobs for rollout in rollouts]
    lengths = torch.tensor(list(map(len, by_rollout)), dtype=torch.int64)
    logprobs = [logprob for part in by_rollout for logprob in part]
    advantages = torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32)
    return FlatRollouts(
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32).to(device),
        advantages=advantages.repeat_interleave(lengths).to(device),
        sequence=torch.arange(len(rollouts)).repeat_interleave(lengths).to(device),
    )
