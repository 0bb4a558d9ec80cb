"""Faults that the self-test detects in hand-made rounds. Tests with real engines: tests/integration/test_self_test.py."""

from __future__ import annotations

import math

import pytest
import torch

from dsreason.rollout.protocol import Completion, TensorFingerprints, make_single_turn
from dsreason.rollout.self_test import (
    Round,
    compute_largest_difference,
    find_not_restored,
    find_unmoved,
    iter_perturbed,
)
from dsreason.rollout.weight_sync import compute_fingerprint


def completion(*logprobs: float, first: int = 1) -> Completion:
    return make_single_turn(tuple(range(first, first + len(logprobs))), "", logprobs, "stop", 0)


def made_round(weight: float, *logprobs: float, buffer: float = 1.0) -> Round:
    parameters = {
        "a": compute_fingerprint(torch.full((2,), weight)),
        "b": compute_fingerprint(torch.full((2,), 2 * weight)),
    }
    return Round(
        [completion(*logprobs)], TensorFingerprints(parameters, {"c": compute_fingerprint(torch.full((2,), buffer))})
    )


REAL = made_round(1.0, -0.5, -1.0)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (completion(-0.5, -1.25), 0.25),
        (completion(-0.5, -1.0, first=2), math.inf),
        (completion(-0.5), math.inf),
        (completion(-0.5, math.nan), math.inf),
    ],
)
def test_difference_is_infinite_for_different_tokens_or_nan(second: Completion, expected: float) -> None:
    assert compute_largest_difference([completion(-0.5, -1.0)], [second]) == expected


def test_perturbed_weights_must_change_tensors_and_completions() -> None:
    assert find_unmoved(REAL, made_round(0.5, -2.0, -3.0), 1e-4) is None
    assert "left 2 of 2 tensors unchanged: a; b" in str(find_unmoved(REAL, made_round(1.0, -2.0, -3.0), 1e-4))
    assert "the completions are the same" in str(find_unmoved(REAL, made_round(0.5, -0.5, -1.0), 1e-4))


def test_unrestored_tensors_and_logprobs_are_reported() -> None:
    assert find_not_restored(REAL, made_round(1.0, -0.5, -1.0), 1e-4, "after") is None
    assert str(find_not_restored(REAL, made_round(0.5, -0.5, -1.0), 1e-4, "after")) == "after, 2 tensors changed: a; b"
    assert str(find_not_restored(REAL, made_round(1.0, -0.5, -1.0, buffer=2.0), 1e-4, "after")) == (
        "after, 1 tensors changed: c"
    )
    assert "log-probabilities differ by 0.25" in str(
        find_not_restored(REAL, made_round(1.0, -0.5, -1.25), 1e-4, "after")
    )
    assert "completions differ" in str(find_not_restored(REAL, made_round(1.0, -0.5, math.nan), 1e-4, "after"))


def test_zeros_and_ones_are_also_perturbed() -> None:
    result = dict(iter_perturbed(iter([("zeros", torch.zeros(1)), ("ones", torch.ones(1))])))
    assert {name: tensor.item() for name, tensor in result.items()} == pytest.approx({"zeros": 0.01, "ones": 0.51})
