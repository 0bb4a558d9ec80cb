"""Work counts of samples and their media, without padding and without the dummy media that synchronize ranks."""

from __future__ import annotations

import pytest
import torch

from dsreason.data.micro_batches import compute_work
from dsreason.data.types import EncodedSample


def sample(length: int, trained: int, images: int = 0, parent: EncodedSample | None = None) -> EncodedSample:
    """Build a sample whose last `trained` tokens are trained."""
    return EncodedSample(
        id="",
        input_ids=torch.zeros(length, dtype=torch.int64),
        loss_mask=torch.arange(length) >= length - trained,
        position_ids=torch.zeros(3, length, dtype=torch.int64),
        mm_token_type_ids=torch.zeros(length, dtype=torch.int64),
        mm_kwargs={"image_grid_thw": torch.tensor([[1, 2, 4]] * images)} if images else {},
        parent=parent,
    )


def test_work_counts_tokens_and_media_of_samples() -> None:
    work = compute_work([[sample(5, 2, images=2)], [sample(3, 3), sample(4, 0, images=1)]], packing=True)
    assert work.spans == [(5, 0), (3, 0), (4, 0)]
    assert work.tokens == 12
    assert work.trained_tokens == 2 + 2  # nothing predicts the first token of a sample
    assert work.grids == [(1, 2, 4)] * 3


@pytest.mark.parametrize(
    ("packing", "spans"),
    [
        (True, [(100, 0), (10, 100), (20, 100), (100, 0), (5, 100)]),
        (False, [(110, 0), (120, 0), (105, 0)]),
    ],
)
def test_shared_prompt_counts_once_per_row(packing: bool, spans: list[tuple[int, int]]) -> None:
    prompt = sample(100, 0, images=1)
    completions = [sample(length, length, parent=prompt) for length in (10, 20, 5)]
    work = compute_work([completions[:2], completions[2:]], packing=packing)
    assert work.spans == spans
    assert work.trained_tokens == 35
    assert work.grids == [(1, 2, 4)] * 2


def test_pair_of_answers_counts_prompt_once() -> None:
    prompt = sample(7, 0)
    work = compute_work([[sample(2, 2, parent=prompt), sample(3, 3, parent=prompt)]], packing=True)
    assert work.spans == [(7, 0), (2, 7), (3, 7)]
