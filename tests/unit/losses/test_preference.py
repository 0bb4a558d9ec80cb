"""Preference losses compared with published vectors, hand-computed values, and plain formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsreason.losses.preference import (
    LOSSES,
    Pairs,
    PairSettings,
    bco_loss,
    build_pairs,
    compute_chosen_nll,
    compute_preference_loss,
    hinge_loss,
    ipo_loss,
    robust_loss,
    sigmoid_loss,
)


def make_pairs(
    chosen: list[float],
    rejected: list[float],
    ref: tuple[list[float], list[float]] | None = None,
    lengths: tuple[list[int], list[int]] | None = None,
) -> Pairs:
    zeros = [0.0] * len(chosen)
    ref_chosen, ref_rejected = ref or (zeros, zeros)
    chosen_length, rejected_length = lengths or ([1] * len(chosen), [1] * len(chosen))
    values = (chosen, rejected, ref_chosen, ref_rejected)
    return Pairs(
        *(torch.tensor(value, dtype=torch.float64) for value in values),
        torch.tensor(chosen_length),
        torch.tensor(rejected_length),
    )


CHOSEN, REJECTED, REF = [-10.0, -12.0], [-11.0, -9.0], ([-10.5, -12.5], [-10.8, -9.5])
PAIRS = make_pairs(CHOSEN, REJECTED, REF, ([4, 5], [2, 4]))
FREE = make_pairs(CHOSEN, REJECTED)
"""The pairs without reference log-probabilities."""


def s(x: float) -> float:
    """Compute -log σ(x)."""
    return math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    ("loss", "pairs", "settings", "expected"),
    [
        (sigmoid_loss, PAIRS, PairSettings(0.1), [0.6587596, 0.6931472]),
        (sigmoid_loss, FREE, PairSettings(0.1), [0.6443967, 0.8543552]),
        (hinge_loss, PAIRS, PairSettings(0.1), [0.93, 1.0]),
        (hinge_loss, FREE, PairSettings(2.0), [0.0, 7.0]),  # h = 2 and -6
        # cDPO: .9 · .6587596 + .1 · .7287596
        (sigmoid_loss, PAIRS, PairSettings(0.1, 0.1), [0.6657596, 0.6931472]),
        # (.9 · .6587596 - .1 · .7287596) / .8; with h = 0 it is log 2 whatever the smoothing
        (robust_loss, PAIRS, PairSettings(0.1, 0.1), [0.6500096, 0.6931472]),
        # per token: 0.5 / 4 + 0.2 / 2 = 0.225, and 0.5 / 5 - 0.5 / 4 = -0.025
        (ipo_loss, PAIRS, PairSettings(0.1), [(0.225 - 5) ** 2, (-0.025 - 5) ** 2]),
        (ipo_loss, PAIRS, PairSettings(2.0), [(0.225 - 0.25) ** 2, (-0.025 - 0.25) ** 2]),
        # rewards 0.05, 0.05 and -0.02, 0.05
        (bco_loss, PAIRS, PairSettings(0.1), [s(0.05) + s(0.02), s(0.05) + s(-0.05)]),
        (bco_loss, PAIRS, PairSettings(0.1, baseline=0.01), [s(0.04) + s(0.03), s(0.04) + s(-0.04)]),
    ],
)
def test_losses_match_hand_computed_values(
    loss: Callable[[Pairs, PairSettings], Tensor], pairs: Pairs, settings: PairSettings, expected: list[float]
) -> None:
    assert loss(pairs, settings).tolist() == pytest.approx(expected, abs=5e-8)


def test_margin_is_the_difference_of_log_ratios() -> None:
    assert (0.1 * PAIRS.margin).tolist() == pytest.approx([0.07, 0.0])


def test_sft_term_averages_over_chosen_tokens() -> None:
    assert compute_chosen_nll(PAIRS).tolist() == pytest.approx([2.5, 2.4])


def test_robust_is_unbiased_under_flipped_labels() -> None:
    flipped = make_pairs(REJECTED, CHOSEN, (REF[1], REF[0]))
    settings = PairSettings(0.7, 0.2)
    mean = 0.8 * robust_loss(PAIRS, settings) + 0.2 * robust_loss(flipped, settings)
    assert mean.tolist() == pytest.approx(sigmoid_loss(PAIRS, PairSettings(0.7)).tolist())


def test_far_margins_stay_finite() -> None:
    far = make_pairs([0.0, -1e5], [-1e5, 0.0])
    for loss in LOSSES.values():
        assert loss(far, PairSettings(1.0, 0.1, 0.5)).isfinite().all()


LENGTHS = torch.tensor([[2, 3], [1, 2], [3, 1]])
LOGPROBS = -torch.rand(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
REFERENCE = torch.tensor([[-3.0, -2.5], [-1.0, -4.0], [-6.0, -0.5]], dtype=torch.float64)


def test_token_logprobs_are_summed_per_answer() -> None:
    pairs = build_pairs(torch.tensor([-1.0, -2, -4, -8, -16, -32]), torch.tensor([[2, 1], [1, 2]]), REFERENCE[:2])
    assert pairs.chosen.tolist() == [-3, -8]
    assert pairs.rejected.tolist() == [-4, -48]
    assert pairs.chosen_ratio.tolist() == [0, -7]
    assert pairs.rejected_ratio.tolist() == [-1.5, -44]


def log_sigma(x: Tensor) -> Tensor:
    return torch.log(1 / (1 + torch.exp(-x)))


def of_one_pair(name: str, c: Tensor, r: Tensor, n_c: int, n_r: int, settings: PairSettings) -> Tensor:
    """Compute one pair's loss from log-ratios and lengths, with the formula written out."""
    beta, smoothing, baseline = settings.beta, settings.label_smoothing, settings.baseline
    h = beta * (c - r)
    formulas = {
        "sigmoid": -(1 - smoothing) * log_sigma(h) - smoothing * log_sigma(-h),
        "robust": (-(1 - smoothing) * log_sigma(h) + smoothing * log_sigma(-h)) / (1 - 2 * smoothing),
        "hinge": torch.clamp(1 - h, min=0),
        "ipo": (c / n_c - r / n_r - 1 / (2 * beta)) ** 2,
        "bco": -log_sigma(beta * c - baseline) - log_sigma(baseline - beta * r),
    }
    return formulas[name]


def by_hand(logprobs: Tensor, name: str, settings: PairSettings) -> Tensor:
    """Compute the mean loss of the three pairs."""
    total, at = torch.zeros((), dtype=torch.float64), 0
    for (n_c, n_r), (ref_c, ref_r) in zip(LENGTHS.tolist(), REFERENCE.tolist(), strict=True):
        c, r = logprobs[at : at + n_c].sum(), logprobs[at + n_c : at + n_c + n_r].sum()
        at += n_c + n_r
        item = -c / n_c if name == "sft" else of_one_pair(name, c - ref_c, r - ref_r, n_c, n_r, settings)
        total = total + item / 3
    return total


@pytest.mark.parametrize("name", [*LOSSES, "sft"])
@pytest.mark.parametrize("cut", [[3], [1, 2], [1, 1, 1], [0, 2, 0, 1]])
def test_loss_and_gradient_match_the_formula(name: str, cut: list[int]) -> None:
    settings = PairSettings(0.4, 0.15, 0.3)
    weights, sft = ({}, 1.0) if name == "sft" else ({name: 1.0}, 0.0)
    expected_in = LOGPROBS.clone().requires_grad_()
    expected = by_hand(expected_in, name, settings)
    expected.backward()
    found_in = LOGPROBS.clone().requires_grad_()
    total, pair, token = 0.0, 0, 0
    for size in cut:
        lengths = LENGTHS[pair : pair + size]
        count = int(lengths.sum())
        pairs = build_pairs(found_in[token : token + count], lengths, REFERENCE[pair : pair + size])
        loss = compute_preference_loss(pairs, settings, weights, sft, num_pairs=3)
        loss.backward()  # also without pairs: every rank runs it
        total, pair, token = total + float(loss.detach()), pair + size, token + count
    assert total == pytest.approx(float(expected.detach()), abs=1e-12)
    assert torch.allclose(found_in.grad, expected_in.grad, atol=1e-12)


def test_mixed_loss_is_weighted_sum() -> None:
    settings = PairSettings(0.1, baseline=0.01)
    parts = [LOSSES[name](PAIRS, settings).mean() for name in ("sigmoid", "bco")]
    expected = 0.8 * parts[0] + 0.2 * parts[1] + compute_chosen_nll(PAIRS).mean()
    assert float(
        compute_preference_loss(PAIRS, settings, {"sigmoid": 0.8, "bco": 0.2}, 1.0, num_pairs=2)
    ) == pytest.approx(float(expected))
