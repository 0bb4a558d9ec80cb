"""Trainer/engine importance weights compared with hand-computed values."""

import pytest
import torch

from dsreason.losses.corrections import (
    CORRECTIONS,
    geometric_mask,
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
)

# Two sequences with the products 0.75 and 2.
WEIGHTS = [1.0, 3.0, 0.25, 1.0, 2.0]
LOG_RATIO = torch.tensor(WEIGHTS).log()
SEQUENCE = torch.tensor([0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("correction", "bounds", "expected"),
    [
        (token_truncate, {"high": 2.5}, [1, 2.5, 0.25, 1, 2]),
        (token_truncate, {"low": 0.5, "high": 2.5}, [1, 2.5, 0.5, 1, 2]),
        (token_mask, {"low": 0.0, "high": 2.5}, [1, 0, 0.25, 1, 2]),  # MIS
        (token_mask, {}, [1, 3, 0, 1, 2]),  # IcePop's 0.5 to 5
        (sequence_truncate, {"high": 1.5}, [0.75, 0.75, 0.75, 1.5, 1.5]),
        (sequence_truncate, {}, [0.75, 0.75, 0.75, 2, 2]),
        (sequence_mask, {"high": 1.5}, [0.75, 0.75, 0.75, 0, 0]),
        (sequence_mask, {"low": 0.8}, [0, 0, 0, 2, 2]),
        # cube root of 0.75 and square root of 2
        (geometric_mask, {"low": 0.9, "high": 1.5}, [0.908560, 0.908560, 0.908560, 1.414214, 1.414214]),
        (geometric_mask, {"low": 0.95, "high": 1.5}, [0, 0, 0, 1.414214, 1.414214]),
        (geometric_mask, {}, [0, 0, 0, 0, 0]),
    ],
)
def test_correction_weights_match_hand_computed_values(correction, bounds, expected):
    assert correction(LOG_RATIO, SEQUENCE, **bounds).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("correction", [token_mask, sequence_mask, geometric_mask])
def test_correction_weight_at_bound_is_kept(correction):
    assert correction(torch.zeros(5), SEQUENCE, low=1.0, high=1.0).tolist() == [1] * 5


def test_token_truncation_stops_at_two_by_default():
    assert token_truncate(LOG_RATIO, SEQUENCE)[1].item() == 2


def test_geometric_mask_keeps_long_sequence():
    # 600 tokens of w = e^0.002: product e^1.2 = 3.32, geometric mean 1.002
    log_ratio, sequence = torch.full((600,), 0.002), torch.zeros(600, dtype=torch.int64)
    assert sequence_mask(log_ratio, sequence)[0].item() == 0
    assert geometric_mask(log_ratio, sequence)[0].item() == pytest.approx(1.002, abs=1e-5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_is_one_for_equal_policies(name):
    assert CORRECTIONS[name](torch.zeros(5), SEQUENCE).tolist() == [1] * 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient(name):
    assert not CORRECTIONS[name](LOG_RATIO.clone().requires_grad_(), SEQUENCE).requires_grad


@pytest.mark.parametrize("name", CORRECTIONS)
def test_overflowing_product_is_truncated_or_masked(name):
    weights = CORRECTIONS[name](torch.tensor([90.0, 90.0]), torch.tensor([0, 0]))
    assert weights.tolist() in ([2, 2], [3, 3], [0, 0])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_empty_micro_batch_has_no_correction_weights(name):
    assert CORRECTIONS[name](torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
