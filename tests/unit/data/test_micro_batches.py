"""The division of a rank's samples into micro-batches, and the dummy media that are added."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dsreason.config.schema import SFTConfig
from dsreason.data.collate import append_dummies, collate, pack
from dsreason.data.micro_batches import count_with_parent, cut_into_rows, cut_samples, describe_forward_size
from dsreason.data.types import EncodedSample, Segment
from dsreason.errors import DataError


def sample(length: int, parent: EncodedSample | None = None) -> EncodedSample:
    """Build a sample whose last token is trained."""
    return EncodedSample(
        id=f"of {length}",
        input_ids=torch.full((length,), 5),
        loss_mask=torch.arange(length) == length - 1,
        position_ids=torch.arange(length).expand(3, -1),
        mm_token_type_ids=torch.zeros(length, dtype=torch.int64),
        mm_kwargs={},
        parent=parent,
    )


def image(length: int) -> EncodedSample:
    """Build a dummy image sample of `length` tokens."""
    made = sample(length)
    made.loss_mask[:] = False
    made.mm_kwargs.update(pixel_values=torch.zeros(4, 2), image_grid_thw=torch.tensor([[1, 2, 2]]))
    return made


def config_of(**train: object) -> SFTConfig:
    return SFTConfig.model_validate({"train": train, "model": {"max_length": 8}})


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5, 4, 3, 2], [[5, 3], [4, 2]]),
        ([2, 3, 4, 5], [[5, 3], [4, 2]]),
        ([8, 1, 8], [[8], [8], [1]]),
        ([3, 3, 3, 2, 2], [[3, 3, 2], [3, 2]]),
        ([], []),
    ],
)
def test_longest_samples_fill_rows_first(lengths: list[int], expected: list[list[int]]) -> None:
    rows = cut_into_rows([sample(length) for length in lengths], 8)
    assert [[len(item) for item in row] for row in rows] == expected


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (26, [[3, 2, 1, 4, 2]]),  # (10 + 3 + 2 + 1) + (4 + 4 + 2)
        (25, [[3, 2, 1], [4, 2]]),
        (15, [[3, 2], [1], [4, 2]]),  # the prompt of 10 tokens is in two rows
        (14, [[3, 1], [2], [4, 2]]),
    ],
)
def test_completions_share_row_if_budget_allows(budget: int, expected: list[list[int]]) -> None:
    long, short = sample(10), sample(4)
    completions = [sample(3, long), sample(4, short), sample(2, long), sample(2, short), sample(1, long)]
    rows = cut_into_rows(completions, budget)
    assert [[len(item) for item in row] for row in rows] == expected
    assert max(pack(row).input_ids.shape[1] for row in rows) <= budget


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, [[5, 3], [4, 2]]),  # rows of model.max_length = 8
        ({"max_tokens_per_micro_batch": 10}, [[5, 4], [3, 2]]),
        ({"micro_batch_size": 1}, [[5], [4], [3], [2]]),
        ({"micro_batch_size": 3}, [[5, 4, 3], [2]]),
        ({"packing": False}, [[5], [4], [3], [2]]),
        ({"packing": False, "max_tokens_per_micro_batch": 10}, [[5, 4], [3, 2]]),
        ({"packing": False, "max_tokens_per_micro_batch": 8}, [[5], [4, 3], [2]]),  # 2 rows of 4, padded
    ],
)
def test_micro_batches_follow_the_configuration(train: dict[str, object], expected: list[list[int]]) -> None:
    groups = cut_samples([sample(length) for length in (2, 3, 4, 5)], config_of(**train))
    assert [[len(item) for item in group] for group in groups] == expected


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({}, r"sample 'of 2' has 9 tokens, but a micro-batch may have only 8 \(model\.max_length\)"),
        (
            {"max_tokens_per_micro_batch": 6},
            r"sample 'of 2' has 9 tokens, but a micro-batch may have only 6 \(train\.max_tokens_per_micro_batch\)",
        ),
    ],
)
def test_oversized_sample_error_names_the_key(train: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        cut_samples([sample(2, sample(7))], config_of(**train))


@pytest.mark.parametrize(
    ("dummies", "width"),
    [
        ([3], 10),  # in the padding of the last row, which is the shortest
        ([3, 4], 10),
        ([3, 4, 2], 12),
        ([9, 9], 21),
    ],
)
def test_dummies_widen_padded_rows_only_if_needed(dummies: Sequence[int], width: int) -> None:
    [group] = cut_samples(
        [sample(length) for length in (3, 10, 6)], config_of(packing=False, max_tokens_per_micro_batch=30)
    )
    before = collate(group, pad_id=0)
    after = append_dummies(before, [image(length) for length in dummies], pad_id=0)
    assert before.input_ids.shape == (3, 10)
    assert after.input_ids.shape == (3, width)
    assert after.num_tokens == before.num_tokens + sum(dummies)
    flat = after.input_ids.flatten()
    assert flat[after.targets].tolist() == [5, 5, 5]
    assert [int(place) % width for place in after.targets] == [9, 5, 2]  # the last token of each sample


def test_dummies_extend_packed_row_as_separate_segments() -> None:
    row = append_dummies(pack([sample(4), sample(2)]), [image(3), image(5)], pad_id=0)
    assert row.segments == (Segment(0, 4), Segment(4, 2), Segment(6, 3), Segment(9, 5))
    assert row.num_tokens == row.input_ids.shape[1] == 14
    assert row.targets.tolist() == [3, 5]


def test_fixed_size_rows_keep_completions_together() -> None:
    long, short = sample(5), sample(3)
    completions = [
        sample(3, long),
        sample(4, short),
        sample(1, long),
        sample(2, short),
    ]  # 8, 7, 6 and 5 tokens with their prompts
    rows = cut_samples(completions, config_of(micro_batch_size=2))
    assert [[len(item) for item in row] for row in rows] == [[3, 1], [4, 2]]


def test_completion_length_includes_its_prompt() -> None:
    assert count_with_parent(sample(2, sample(7))) == 9


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({}, "one packed row of up to 8 tokens (model.max_length)"),
        ({"max_tokens_per_micro_batch": 6}, "one packed row of up to 6 tokens (train.max_tokens_per_micro_batch)"),
        ({"micro_batch_size": 4}, "one packed row of up to 4 samples (train.micro_batch_size)"),
        ({"packing": False, "micro_batch_size": 4}, "padded rows of up to 4 samples (train.micro_batch_size)"),
    ],
)
def test_forward_size_is_described_with_its_key(train: dict[str, object], expected: str) -> None:
    assert describe_forward_size(config_of(**train)) == expected
