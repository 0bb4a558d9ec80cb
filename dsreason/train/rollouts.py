"""Rollouts: completions with their prompts, rewards and advantages, and the same as the loss takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsreason.data.chat import EncodedPrompt
from dsreason.data.types import Batch, EncodedSample
from dsreason.rewards.scoring import Scores
from dsreason.rollout.protocol import Completion


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt.

    Example: `Rollout(prompt, completion, reward=1.5, rewards={"format": 1.0, "single_choice": 0.5}, advantage=0.7)`.
    """

    prompt: EncodedPrompt
    completion: Completion
    reward: float
    """The weighted sum."""
    rewards: dict[str, float]
    """By function, unweighted."""
    advantage: float


@dataclass(frozen=True)
class FlatRollouts:
    """What the loss needs beside log-probabilities, one entry for each of the `N` completion tokens of a micro-batch."""

    rollout_logprobs: Tensor  # [N] float32, of the engine
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, row of the token in the micro-batch


def to_rollouts(
    prompts: Sequence[EncodedPrompt],
    completions: Sequence[Completion],
    scores: Scores,
    num_generations: int,
    advantages_of: Callable[[Tensor], Tensor],
) -> list[Rollout]:
    """Join what belongs together; `prompts` and the rest are flat, the completions of a prompt follow each other.

    `advantages_of` maps rewards `[prompts, num_generations]` to advantages of that shape.
    """
    if not prompts:  # a rank without a prompt
        return []
    advantages = advantages_of(torch.from_numpy(scores.total).reshape(-1, num_generations)).flatten().tolist()
    return [
        Rollout(
            prompt=prompts[i],
            completion=completions[i],
            reward=float(scores.total[i]),
            rewards={name: float(values[i]) for name, values in scores.by_function.items()},
            advantage=advantages[i],
        )
        for i in range(len(prompts))
    ]


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
    chosen = [rollouts[int(name)] for name in batch.ids if name]
    lengths = [len(rollout.completion.ids) for rollout in chosen]
    logprobs = np.concatenate([np.asarray(rollout.completion.logprobs, np.float32) for rollout in chosen] or [[]])
    advantages = np.repeat(np.asarray([rollout.advantage for rollout in chosen], np.float32), lengths)
    sequence = np.repeat(np.arange(len(chosen)), lengths)
    return FlatRollouts(
        rollout_logprobs=torch.from_numpy(logprobs.astype(np.float32)).to(device),
        advantages=torch.from_numpy(advantages).to(device),
        sequence=torch.from_numpy(sequence).to(device),
    )
