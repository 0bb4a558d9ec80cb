"""Sums over sequences compared with hand-computed values."""

import torch

from dsreason.losses.sequences import average_by_sequence, count_sequence_tokens, sum_by_sequence


def test_tokens_receive_length_sum_and_mean():
    # sequence 1 has no token here; the tokens of a sequence need not be contiguous
    sequence = torch.tensor([0, 2, 0, 2, 2])
    values = torch.tensor([1.0, 2.0, 5.0, 3.0, 4.0])
    assert count_sequence_tokens(sequence).tolist() == [2, 3, 2, 3, 3]
    assert sum_by_sequence(values, sequence).tolist() == [6, 9, 6, 9, 9]
    assert average_by_sequence(values, sequence).tolist() == [3, 3, 3, 3, 3]


def test_mean_gradient_reaches_all_sequence_tokens():
    values = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    average_by_sequence(values, torch.tensor([0, 0, 1]))[0].backward()
    assert values.grad.tolist() == [0.5, 0.5, 0]


def test_empty_sequence_gives_empty_results():
    sequence = torch.zeros(0, dtype=torch.int64)
    assert count_sequence_tokens(sequence).shape == (0,)
    assert average_by_sequence(torch.zeros(0), sequence).shape == (0,)
