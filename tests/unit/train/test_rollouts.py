"""Rollouts in the form that the loss reads, from hand-made prompts and completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import collate, pack
from dsreason.data.types import EncodedSample, Sample
from dsreason.losses.advantages import batch_normalized, group_centered
from dsreason.rewards.scoring import CompletionScores
from dsreason.rollout.protocol import make_single_turn
from dsreason.train.grpo.rollouts import (
    Group,
    Rollout,
    add_advantages,
    build_training_sample,
    flatten,
    is_informative,
    join_group,
    make_rollouts,
    split_into_steps,
)


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
    return Rollout(prompt([1, 2, 3], 7), make_single_turn(ids, "", logprobs, "stop", 0), 0.0, {}, advantage)


def test_only_completion_after_prompt_is_trained() -> None:
    sample = build_training_sample(rollout((8, 9), (-1.0, -2.0), 0.5))
    assert sample.id == "p"
    assert sample.parent is not None
    assert sample.parent.input_ids.tolist() == [1, 2, 3]
    assert sample.input_ids.tolist() == [8, 9]
    assert sample.loss_mask.tolist() == [True, True]
    assert sample.position_ids.tolist() == [[8, 9]] * 3  # after the maximum over all axes


def test_tokens_carry_values_of_their_rollouts() -> None:
    rollouts = [rollout((7,), (-3.0,), -1.5), rollout((8, 9), (-1.0, -2.0), 0.5)]
    samples = [build_training_sample(item) for item in rollouts]
    flat = flatten(rollouts, torch.device("cpu"))
    for batch in collate(samples, pad_id=0), pack(samples):
        assert batch.input_ids.flatten()[batch.targets].tolist() == [7, 8, 9]
    assert flat.rollout_logprobs.tolist() == [-3.0, -1.0, -2.0]
    assert flat.advantages.tolist() == [-1.5, 0.5, 0.5]
    assert flat.sequence.tolist() == [0, 1, 1]


def test_dummy_micro_batch_has_no_tokens() -> None:
    flat = flatten([], torch.device("cpu"))
    assert flat.advantages.shape == flat.rollout_logprobs.shape == flat.sequence.shape == (0,)


def group(place: tuple[int, int], rewards: list[float]) -> Group:
    completions = [make_single_turn((5,), "a", (-1.0,), "stop", 0)] * len(rewards)
    scores = CompletionScores(np.array(rewards), {"right": np.array(rewards)})
    return make_rollouts([prompt([1], 0)] * len(rewards), [place] * len(rewards), completions, scores)


def with_others(*others: object) -> Callable[[object], list[object]]:
    """Return a gather function for rank 0 if the other ranks contribute `others`."""
    return lambda own: [own, *others]


def test_rank_without_prompts_has_no_rollouts() -> None:
    assert make_rollouts([], [], [], CompletionScores(np.zeros(0), {"right": np.zeros(0)})) == []
    assert add_advantages([], [], 3, group_centered, with_others()) == []


def test_sampled_rollout_has_rewards_but_no_group() -> None:
    completions = [make_single_turn((i,), "", (-1.0,), "stop", 0) for i in range(2)]
    scores = CompletionScores(np.array([1.0, 3.0]), {"right": np.array([0.0, 1.0])})
    rollouts = make_rollouts([prompt([1], 0), prompt([2], 0)], [(7, 0), (7, 2)], completions, scores)
    assert [
        (item.place, item.completion.ids, item.reward, item.rewards, item.advantage, item.group) for item in rollouts
    ] == [
        ((7, 0), (0,), 1.0, {"right": 0.0}, 0.0, None),
        ((7, 2), (1,), 3.0, {"right": 1.0}, 0.0, None),
    ]


def test_advantages_are_computed_within_each_group() -> None:
    groups = [group((0, 0), [1.0, 0.0]), group((0, 1), [3.0, 3.0]), group((0, 2), [5.0, 9.0])]
    advantages = add_advantages(groups, [True, True, False], 3, group_centered, with_others())
    assert [item.advantage for item in advantages] == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    assert [item.reward for item in advantages] == [1.0, 0.0, 3.0, 3.0, 5.0, 9.0]
    assert [item.group for item in advantages] == [0, 0, 1, 1, None, None]
    assert advantages[1].rewards == {"right": 0.0}


def test_batch_std_covers_all_ranks() -> None:
    # Rewards [[1, 0], [1, 1]] over two ranks: std 0.4330 of all four, so ±0.5 / 0.4330 = ±1.1547.
    other_items = with_others([((0, 1), [1.0, 1.0])])
    advantages = add_advantages([group((0, 0), [1.0, 0.0])], [True], 2, batch_normalized, other_items)
    assert [item.advantage for item in advantages] == pytest.approx([1.1547, -1.1547], abs=1e-4)


@pytest.mark.parametrize(("wanted", "numbers"), [(2, [0, None, None]), (3, [0, None, 2]), (9, [0, None, 2])])
def test_first_informative_groups_of_ranks_are_chosen(wanted: int, numbers: list[int | None]) -> None:
    local = [group((4, 0), [1, 0]), group((4, 2), [1, 1]), group((5, 0), [0, 1])]
    remaining = [is_informative(item, 0.0) for item in local]
    assert remaining == [True, False, True]
    other_items = with_others([((4, 1), [1, 0]), ((5, 1), [1, 0])])
    advantages = add_advantages(local, remaining, wanted, group_centered, other_items)
    assert [item.group for item in advantages[::2]] == numbers


def test_rewards_within_tolerance_are_uninformative() -> None:
    assert not is_informative(group((0, 0), [0.1, 0.1, 0.1]), 0.0)
    assert not is_informative(group((0, 0), [0.50, 0.52]), 0.05)
    assert is_informative(group((0, 1), [0.50, 0.60]), 0.05)


def test_rollouts_without_reward_have_no_advantage() -> None:
    nan = float("nan")
    groups = [group((0, 0), [1.0, nan, 0.0]), group((0, 1), [nan, nan, nan])]
    assert [is_informative(item, 0.0) for item in groups] == [True, False]
    rollouts = add_advantages(groups, [True, True], 2, group_centered, with_others())
    assert [item.advantage for item in rollouts] == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert [item.reward for item in rollouts] == [1.0, None, 0.0, None, None, None]
    assert rollouts[1].rewards == {"right": None}


def test_nothing_is_trained_without_informative_groups() -> None:
    local = [group((4, 0), [1, 1]), group((4, 2), [1, 1])]
    advantages = add_advantages(local, [False, False], 3, group_centered, with_others([]))
    assert [(item.advantage, item.group) for item in advantages] == [(0.0, None)] * 4


def test_group_assignment_to_steps_ignores_rank() -> None:
    item = group((0, 0), [0.5])[0]
    rollouts = [replace(item, group=number) for number in (0, 2, 4, 5, None, 9)]
    steps = split_into_steps(rollouts, num_groups=10, num_steps=4)
    assert [[item.group for item in step] for step in steps] == [[0, 2], [4], [5], [9]]
    alone = split_into_steps([replace(item, group=number) for number in range(10)], num_groups=10, num_steps=4)
    assert [[item.group for item in step] for step in alone] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]


def test_joined_rollouts_travel_without_their_prompts() -> None:
    prompts = {(5, number): prompt([1, number], 0) for number in (0, 1, 2)}
    trained = [replace(item, prompt=prompts[5, 0], group=0) for item in group((5, 0), [1.0, 2.0])]
    custom = [*trained, *group((5, 2), [0.0])]
    sent = []

    def exchange(own: list[object]) -> list[list[object]]:
        sent.extend(own)
        other = vars(group((5, 1), [7.0])[0]) | {"group": 1}
        return [own, [{name: value for name, value in other.items() if name != "prompt"}]]

    joined = join_group(custom, prompts, exchange)
    assert [(item.place, item.reward) for item in joined] == [((5, 0), 1.0), ((5, 0), 2.0), ((5, 1), 7.0)]
    assert all(item.prompt is prompts[item.place] for item in joined)
    assert len(sent) == 2 and not any("prompt" in item for item in sent)
