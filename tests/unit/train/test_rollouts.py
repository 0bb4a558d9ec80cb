"""Rollouts as the loss takes them: hand-made prompts and completions."""

from __future__ import annotations

import numpy as np
import torch

from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import collate
from dsreason.data.types import EncodedSample, Sample
from dsreason.losses.advantages import group_centered
from dsreason.rewards.scoring import Scores
from dsreason.rollout.protocol import Completion
from dsreason.train.rollouts import Rollout, flatten, to_rollouts, training_sample


def prompt(ids: list[int], last_position: int) -> EncodedPrompt:
    positions = torch.arange(len(ids)).expand(3, -1).clone()
    positions[2, -1] = last_position  # an image may count further than its tokens
    encoded = EncodedSample(
        id="p",
        input_ids=torch.tensor(ids),
        loss_mask=torch.zeros(len(ids), dtype=torch.bool),
        position_ids=positions,
        mm_token_type_ids=torch.zeros(len(ids), dtype=torch.int64),
        mm_kwargs={},
    )
    return EncodedPrompt(Sample("p", []), encoded, ids, [])


def rollout(ids: tuple[int, ...], logprobs: tuple[float, ...], advantage: float) -> Rollout:
    return Rollout(prompt([1, 2, 3], 7), Completion(ids, "", logprobs, "stop", 0), 0.0, {}, advantage)


def test_a_completion_follows_its_prompt_and_alone_is_trained() -> None:
    sample = training_sample(rollout((8, 9), (-1.0, -2.0), 0.5), 3)
    assert sample.id == "3"
    assert sample.input_ids.tolist() == [1, 2, 3, 8, 9]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.position_ids[:, 3:].tolist() == [[8, 9]] * 3  # after the largest of all axes


def test_tokens_of_a_micro_batch_come_with_their_rollouts_numbers() -> None:
    rollouts = [rollout((8, 9), (-1.0, -2.0), 0.5), rollout((7,), (-3.0,), -1.5)]
    batch = collate([training_sample(rollouts[1], 1), training_sample(rollouts[0], 0)], pad_id=0)
    flat = flatten(batch, rollouts, torch.device("cpu"))
    assert batch.input_ids[batch.loss_mask].tolist() == [7, 8, 9]
    assert flat.rollout_logprobs.tolist() == [-3.0, -1.0, -2.0]
    assert flat.advantages.tolist() == [-1.5, 0.5, 0.5]
    assert flat.sequence.tolist() == [0, 1, 1]


def test_a_micro_batch_of_nothing_but_dummies_has_no_tokens() -> None:
    untrained = collate([training_sample(rollout((), (), 0.0), 0)], pad_id=0)
    flat = flatten(untrained, [rollout((), (), 0.0)], torch.device("cpu"))
    assert flat.advantages.shape == flat.rollout_logprobs.shape == flat.sequence.shape == (0,)


def test_a_rank_without_prompts_has_no_rollouts() -> None:
    assert to_rollouts([], [], Scores(np.zeros(0), {"right": np.zeros(0)}), 4, group_centered) == []


def test_advantages_are_measured_within_each_prompts_group() -> None:
    prompts = [prompt([1], 0)] * 2 + [prompt([2], 0)] * 2
    completions = [Completion((5,), "a", (-1.0,), "stop", 0)] * 4
    scores = Scores(np.array([1.0, 0.0, 3.0, 3.0]), {"right": np.array([1.0, 0.0, 1.0, 1.0])})
    found = to_rollouts(prompts, completions, scores, 2, group_centered)
    assert [one.advantage for one in found] == [0.5, -0.5, 0.0, 0.0]
    assert [one.reward for one in found] == [1.0, 0.0, 3.0, 3.0]
    assert found[1].rewards == {"right": 0.0}
