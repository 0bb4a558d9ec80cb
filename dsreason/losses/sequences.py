"""Functions that compute sums and means over the sequences in a flat micro-batch, with a result for every token."""

from __future__ import annotations

import torch
from torch import Tensor


def count_sequence_tokens(sequence: Tensor) -> Tensor:
    """Return the length of each token's sequence: `[N]` int64 → `[N]` int64.

    A sequence is never split between micro-batches, so the local count is complete.

    Example: sequence [0, 0, 1] gives [2, 2, 1].
    """
    return torch.bincount(sequence)[sequence]


def sum_by_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the sum of the values over each token's sequence: `[N]`, `[N]` int64 → `[N]`, differentiable.

    Example: values [1, 2, 5] with sequence [0, 0, 1] give [3, 3, 5].
    """
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    sums = values.new_zeros(num_sequences).index_add(0, sequence, values)
    return sums.index_select(0, sequence)


def average_by_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the mean of the values over each token's sequence: `[N]`, `[N]` int64 → `[N]`, differentiable.

    Example: values [1, 2, 5] with sequence [0, 0, 1] give [1.5, 1.5, 5].
    """
    return sum_by_sequence(values, sequence) / count_sequence_tokens(sequence)
