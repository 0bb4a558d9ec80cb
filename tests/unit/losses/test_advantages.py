"""Advantages compared with hand-computed values; "cosmos-rl" marks values that cosmos-rl's function also returns."""

import pytest
import torch

from dsreason.losses.advantages import (
    ADVANTAGES,
    batch_normalized,
    group_centered,
    group_normalized,
    leave_one_out,
)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # mean 1/4, std sqrt(3)/4 = 0.433013: 0.75 / 0.433014 and -0.25 / 0.433014 (cosmos-rl)
        ([1, 0, 0, 0], [1.732047, -0.577349, -0.577349, -0.577349]),
        # mean 1, std sqrt(1/2) (cosmos-rl)
        ([2, 1, 0, 1], [1.414212, 0, -1.414212, 0]),
        # mean 1/2, std sqrt(1/6) (cosmos-rl)
        ([0.5, 0, 1], [0, -1.224742, 1.224742]),
        # mean 1/8, std sqrt(7)/8 (cosmos-rl)
        ([1, 0, 0, 0, 0, 0, 0, 0], [2.645743] + [-0.377963] * 7),
    ],
)
def test_group_normalized_divides_by_the_population_std(rewards, expected):
    # Unlike ours, cosmos-rl's remote rewards divide by the sample std + 1e-4, so [1, 0, 0, 0] gives 1.4997 there.
    assert group_normalized(torch.tensor([rewards]).float())[0].tolist() == pytest.approx(expected, abs=2e-6)


def test_group_centered_advantages_are_not_scaled():
    assert group_centered(torch.tensor([[1.0, 0, 0, 0]])).tolist() == [[0.75, -0.25, -0.25, -0.25]]  # cosmos-rl


def test_leave_one_out_subtracts_mean_of_others():
    # 2 - 2/3, 1 - 3/3, 0 - 4/3, 1 - 3/3
    assert leave_one_out(torch.tensor([[2.0, 1, 0, 1]]))[0].tolist() == pytest.approx([4 / 3, 0, -4 / 3, 0])
    assert leave_one_out(torch.tensor([[1.0, 0, 0, 0]]))[0].tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_batch_normalized_divides_by_batch_std():
    # all four: mean 3/4, std sqrt(3)/4 = 0.433013; 0.5 / 0.433014
    advantages = batch_normalized(torch.tensor([[1.0, 0], [1, 1]]))
    assert advantages.flatten().tolist() == pytest.approx([1.154698, -1.154698, 0, 0], abs=1e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_are_computed_per_group(kind):
    rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 1]])
    advantages = ADVANTAGES[kind](rewards)
    assert advantages.shape == (2, 4)
    assert advantages.sum(dim=1).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert advantages[1].tolist() == pytest.approx((torch.tensor([-1, -1, 1, 1]) * advantages[1, 3]).tolist())


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_advantages_are_zero_when_rewards_are_equal(kind, size):
    # the float32 mean of seven 0.1 is not 0.1, and the difference over a std of 1e-9 + 1e-6 would not be small
    rewards = torch.full((2, size), 0.1)
    rewards[1] = torch.arange(size)
    assert ADVANTAGES[kind](rewards)[0].tolist() == [0.0] * size


NAN = float("nan")


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_missing_rewards_do_not_change_the_others(kind):
    rewards = torch.tensor([[1.0, NAN, 0.0, NAN, 0.5], [NAN, NAN, NAN, 2.0, NAN], [NAN] * 5], dtype=torch.float64)
    advantages = ADVANTAGES[kind](rewards)
    existing = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64)
    if kind != "batch_normalized":  # its std also covers the other groups
        assert advantages[0, [0, 2, 4]].tolist() == pytest.approx(ADVANTAGES[kind](existing)[0].tolist())
    assert advantages[0, [1, 3]].tolist() == [0, 0]
    assert advantages[1:].abs().sum().item() == 0


def test_batch_std_ignores_missing_rewards():
    # 1, 0 and 2: mean 1, std sqrt(2/3) = 0.816497; ±0.5 / 0.816498
    advantages = batch_normalized(torch.tensor([[1.0, 0.0], [2.0, NAN]]))
    assert advantages.flatten().tolist() == pytest.approx([0.612372, -0.612372, 0, 0], abs=1e-6)


def test_batch_without_rewards_has_no_advantages():
    assert batch_normalized(torch.tensor([[NAN, NAN]])).tolist() == [[0, 0]]
