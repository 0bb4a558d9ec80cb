"""Sampling of a token from a row of logits, compared with hand-computed distributions."""

from __future__ import annotations

import math

import pytest
import torch

from dsreason.rollout.protocol import Sampling, draw_random_streams
from dsreason.rollout.transformers_engine import draw

PROBS = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor([PROBS]).log()


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.96, 3), (0.9999, 3)]
)
def test_token_is_drawn_by_cumulative_probability(uniform: float, token: int) -> None:
    drawn, logprob = draw(LOGITS, Sampling(), torch.tensor([uniform]))
    assert drawn.item() == token
    assert logprob.item() == pytest.approx(math.log(PROBS[token]), abs=1e-6)


def test_temperature_zero_draws_the_largest_logit() -> None:
    drawn, logprob = draw(LOGITS, Sampling(temperature=0), torch.tensor([0.99]))
    assert drawn.item() == 0
    assert logprob.item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_temperature_divides_the_logits() -> None:
    squared = [p**2 for p in PROBS]  # temperature 0.5
    drawn, logprob = draw(LOGITS, Sampling(temperature=0.5), torch.tensor([0.7]))
    assert drawn.item() == 1  # 0.25 / 0.365 = 0.685 lies below 0.7
    assert logprob.item() == pytest.approx(math.log(squared[1] / sum(squared)), abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [0.5]),
        (Sampling(top_k=3), [0.5, 0.3, 0.15]),
        (Sampling(top_k=9), PROBS),
        (Sampling(top_p=0.5), [0.5]),
        (Sampling(top_p=0.6), [0.5, 0.3]),
        (Sampling(top_p=0.94), [0.5, 0.3, 0.15]),
        (Sampling(top_p=0.6, top_k=1), [0.5]),
    ],
)
def test_top_k_and_top_p_are_renormalised(sampling: Sampling, kept: list[float]) -> None:
    drawn, logprob = draw(LOGITS, sampling, torch.tensor([0.999999]))  # the least probable of the remaining tokens
    assert drawn.item() == len(kept) - 1
    assert logprob.item() == pytest.approx(math.log(kept[-1] / sum(kept)), abs=1e-6)


def test_zero_probability_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(4, -1)
    drawn, _ = draw(logits, Sampling(), torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-24]))
    assert drawn.tolist() == [1, 1, 3, 3]


def test_drawn_frequencies_follow_the_distribution() -> None:
    uniform = torch.from_numpy(draw_random_streams(Sampling(max_completion_length=20_000, seed=3), [0])[0])
    drawn, _ = draw(LOGITS.expand(20_000, -1), Sampling(), uniform)
    frequencies = torch.bincount(drawn, minlength=4) / 20_000
    assert torch.allclose(frequencies, torch.tensor(PROBS), atol=0.012)


def test_streams_depend_only_on_seed_and_prompt() -> None:
    first = draw_random_streams(Sampling(seed=1, max_completion_length=4), [0, 1, 2])
    assert (first[2] == draw_random_streams(Sampling(seed=1, max_completion_length=4), [2])[0]).all()
    assert not (first[0] == first[1]).any()
    assert not (first[0] == draw_random_streams(Sampling(seed=2, max_completion_length=4), [0])[0]).any()


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"max_completion_length": 0}]
)
def test_invalid_sampling_settings_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
