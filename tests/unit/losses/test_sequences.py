"""Sums over sequences against numbers worked out by hand."""

import torch

from dsreason.losses.sequences import sequence_lengths, sequence_mean, sequence_sum


def test_every_token_gets_the_count_sum_and_mean_of_its_sequence():
    # sequence 1 has no token here; the tokens of a sequence need not lie together
    sequence = torch.tensor([0, 2, 0, 2, 2])
    values = torch.tensor([1.0, 2.0, 5.0, 3.0, 4.0])
    assert sequence_lengths(sequence).tolist() == [2, 3, 2, 3, 3]
    assert sequence_sum(values, sequence).tolist() == [6, 9, 6, 9, 9]
    assert sequence_mean(values, sequence).tolist() == [3, 3, 3, 3, 3]


def test_the_gradient_of_a_mean_reaches_every_token_of_the_sequence():
    values = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    sequence_mean(values, torch.tensor([0, 0, 1]))[0].backward()
    assert values.grad.tolist() == [0.5, 0.5, 0]


def test_no_tokens_give_no_tokens():
    sequence = torch.zeros(0, dtype=torch.int64)
    assert sequence_lengths(sequence).shape == (0,)
    assert sequence_mean(torch.zeros(0), sequence).shape == (0,)
