"""The number of prompts per engine call, compared with hand-computed values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen2_5_VLConfig

from dsreason.rollout.batches import count_tokens_that_fit, cut_batches, merge_groups

KIB = 2**-20
"""One KiB, in GiB."""
ROWS = [[300, 300], [100, 600], [10], [], [10]]
"""Sizes of rows in bytes, in groups."""


@pytest.mark.parametrize(
    ("memory_gib", "least", "lists"),
    [
        (2 * KIB, 1, [[300, 300, 100, 600, 10, 10]]),
        (KIB, 1, [[300, 300, 100, 600], [10, 10]]),
        (KIB / 4, 1, [[300, 300], [100, 600], [10, 10]]),
        (KIB / 4, 3, [[300, 300, 100, 600], [10, 10]]),
        (KIB / 4, 9, [[300, 300, 100, 600, 10, 10]]),
    ],
)
def test_groups_are_merged_while_room_remains(memory_gib: float, least: int, lists: list[list[int]]) -> None:
    assert list(merge_groups(ROWS, int, memory_gib=memory_gib, least=least, any_rank=bool)) == lists


def test_ranks_yield_the_same_number_of_lists() -> None:
    """Check both cases: the other rank is full after its first group, or still has rows at the end."""
    other = iter([True, False, True])
    lists = merge_groups([[1], [2]], int, memory_gib=1, least=1, any_rank=lambda own: own or next(other))
    assert list(lists) == [[1], [2]]
    other = iter([False, True])
    assert list(merge_groups([[]], int, memory_gib=1, least=1, any_rank=lambda own: own or next(other))) == [[]]


def test_groups_are_read_only_when_needed() -> None:
    read = []

    def groups() -> Iterator[list[int]]:
        for i in range(3):
            read.append(i)
            yield [1024]

    lists = merge_groups(groups(), int, memory_gib=KIB / 2, least=1, any_rank=bool)
    next(lists)
    assert read == [0]


@pytest.mark.parametrize(
    ("batch_size", "batch_tokens", "batches"),
    [
        (2, 0, [[3, 1], [2, 0]]),
        (1, 40, [[3, 1], [2], [0]]),
        (1, 60, [[3, 1, 2], [0]]),
        (3, 40, [[3, 1, 2], [0]]),
        (1, 120, [[3, 1, 2, 0]]),
    ],
)
def test_similar_lengths_share_a_batch(batch_size: int, batch_tokens: int, batches: list[list[int]]) -> None:
    assert cut_batches({0: 30, 1: 10, 2: 20, 3: 8}, batch_size, batch_tokens) == batches


def test_a_batch_has_at_most_256_rows() -> None:
    assert [len(batch) for batch in cut_batches(dict.fromkeys(range(300), 1), 8, 10**9)] == [256, 44]


def test_qwen2_5_7b_tokens_fit_20_gib() -> None:
    text = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    text |= {"hidden_size": 3584, "intermediate_size": 18944}
    # keys and values: 2 * 28 * 4 * 128; activations: 3 * 18944 + 8 * 3584; 2 bytes each
    assert count_tokens_that_fit(Qwen2_5_VLConfig(text_config=text), torch.bfloat16, 20 * 2**30) == 20 * 2**30 // 228352
