"""Correct values for publicly reported faults of rewards and advantages.

Covered by other tests:

- trl#3079, trl#5775 and trl#5902 (completions without a reward count as 0 and bias the others), trl#5773 (one reward in a
  group gives a std of NaN): tests/unit/losses/test_advantages.py::test_missing_rewards_do_not_change_the_others,
  tests/unit/train/test_rollouts.py::test_rollouts_without_reward_have_no_advantage
- trl#3079 (None of one function beside a score of another):
  tests/unit/rewards/test_scoring.py::test_missing_score_does_not_affect_other_functions
- ms-swift#8123 (None makes normalisation over the batch NaN):
  tests/unit/losses/test_advantages.py::test_batch_std_ignores_missing_rewards
- open-r1#628 (a plain number as reference is not LaTeX):
  tests/unit/train/test_check_rewards.py::test_unmatchable_reference_is_rejected
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dsreason.data.types import Sample
from dsreason.losses.advantages import group_normalized
from dsreason.rewards import boxed_math, direct_math, numeric
from tests.unit.reported.chats import reported

ROOT = math.sqrt(2)


@pytest.mark.parametrize(
    "reference",
    ["It is left open.", "", r"\boxed{", r"$\nosuchmacro$", "costs $5 or $6"],
    ids=["words", "empty", "unclosed", "macro", "prices"],
)
@pytest.mark.parametrize("completion", [r"\boxed{5}", "$5$", "5", "no answer"])
@reported("open-r1#293", "open-r1#215", "open-r1#86", "cookbook#335")
def test_unreadable_reference_rewards_no_completion(reference: str, completion: str) -> None:
    assert boxed_math(completion, Sample("1", [], answer=reference)) == 0


@pytest.mark.parametrize(
    ("completion", "reference", "score"),
    [
        (r"\boxed{\frac{64}{400}}", r"\frac{63}{400}", 0),
        (r"\boxed{\frac{63}{400}}", r"\frac{63}{400}", 1),
        (r"\boxed{6}", "$6$", 1),
        ("6", "$6$", 1),
        ("5", "$6$", 0),
    ],
)
@reported("open-r1#566")
def test_reference_without_delimiters_is_compared(completion: str, reference: str, score: float) -> None:
    assert boxed_math(completion, Sample("1", [], answer=reference)) == score


@pytest.mark.parametrize(
    ("reward", "completion", "score"),
    [
        (direct_math, r"Answer: \boxed{180}", 1),
        (direct_math, "Answer: 181", -1),
        (numeric, "Therefore, the answer is: 180.", 1),
        (numeric, "Therefore, the answer is: 181.", 0),
    ],
)
@reported("open-r1#628")
def test_plain_number_may_be_reference(reward: Callable[..., float], completion: str, score: float) -> None:
    assert reward(completion, Sample("1", [], answer="180")) == score


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        pytest.param([1, 0], [1, -1], id="trl#2832"),
        pytest.param([1, -1], [1, -1], id="trl#2832-negative"),
        pytest.param([1, 1, 2], [-1 / ROOT, -1 / ROOT, ROOT], id="trl#2832-three"),
        pytest.param([-3, -3, -2], [-1 / ROOT, -1 / ROOT, ROOT], id="trl#5026"),  # a negative mean keeps the signs
        pytest.param([15, 15, 30], [-1 / ROOT, -1 / ROOT, ROOT], id="UniRL#146"),
    ],
)
def test_advantages_ignore_shift_and_scale(rewards: list[float], expected: list[float]) -> None:
    advantages = group_normalized(torch.tensor([rewards], dtype=torch.float64))[0]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
