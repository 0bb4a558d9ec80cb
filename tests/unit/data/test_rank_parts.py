"""Parts of a packed row that several ranks compute, tested with hand-made rows and numbered media features."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dsreason.data.collate import pack
from dsreason.data.rank_parts import share_media, take_part
from dsreason.data.types import EncodedSample, MediaPart, MediaTokens, Segment
from dsreason.job.part_of import PartOf


def sample(ids: list[int], trained: list[int], parent: EncodedSample | None = None) -> EncodedSample:
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[trained] = True
    positions = torch.arange(len(ids)).repeat(3, 1)
    return EncodedSample(
        "s", torch.tensor(ids), mask, positions, torch.zeros(len(ids), dtype=torch.int64), {}, parent=parent
    )


def test_row_is_padded_and_cut_equally() -> None:
    row = pack([sample([5, 6, 7], [1, 2]), sample([8, 9], [1])])
    parts = [take_part(row, PartOf(number, 2), pad_id=3) for number in (0, 1)]
    for part in parts:
        assert part.input_ids.tolist() == [[5, 6, 7, 8, 9, 3]]
        assert part.segments == (Segment(0, 3), Segment(3, 2), Segment(5, 1))
        assert part.targets.tolist() == [1, 2, 4]
    result = [
        (part.part.start, part.part.end, part.part.targets.tolist(), part.part.predictors.tolist())
        for part in parts
        if part.part
    ]
    assert result == [(0, 3, [0, 1], [0, 1]), (3, 6, [2], [0])]


def test_target_belongs_to_the_predicting_rank() -> None:
    """Check that the first rank, which has the prompt's last token, predicts the first token of both completions."""
    prompt = sample([1, 2], [])
    row = pack([sample([5], [0], prompt), sample([6, 7], [0, 1], prompt)])  # 1 2 5 6 7
    first, second, third = (take_part(row, PartOf(number, 3), pad_id=0).part for number in range(3))
    assert first is not None and second is not None and third is not None
    assert (first.targets.tolist(), first.predictors.tolist()) == ([0, 1], [1, 1])
    assert (second.targets.tolist(), second.predictors.tolist()) == ([2], [1])
    assert (third.start, third.end, third.targets.tolist()) == (4, 6, [])


def test_single_rank_keeps_row_unchanged() -> None:
    row = pack([sample([5, 6, 7], [1])])
    assert take_part(row, PartOf(0, 1), pad_id=0) is row


def shared_out(
    grids: list[list[int]], numbers: Sequence[int], indices: Sequence[int], ranks: int, size: int
) -> list[tuple[torch.Tensor, MediaPart]]:
    """Return the parts of `ranks` ranks with `size` tokens each. Every patch of the media, `[patches, 1]`, is its index."""
    distinct = [grids[numbers.index(number)] for number in range(max(numbers) + 1)]
    pixels = torch.arange(sum(t * h * w for t, h, w in distinct))[:, None]
    media = MediaTokens(torch.tensor(distinct), tuple(numbers), torch.tensor(indices))
    return [share_media(pixels, media, size, PartOf(rank, ranks)) for rank in range(ranks)]


def test_frames_of_one_video_are_split_between_ranks() -> None:
    """Use three frames of 4 patches, which are 1 token each; the second of two ranks has all of these tokens."""
    (pixels, first), (other_items, second) = shared_out([[3, 2, 2]], [0], [4, 6, 7], ranks=2, size=4)
    assert (first.grids.tolist(), len(pixels)) == ([[1, 2, 2]], 4)
    assert (second.grids.tolist(), len(other_items)) == ([[2, 2, 2]], 8)
    assert (first.indices.tolist(), second.indices.tolist()) == ([], [0, 2, 3])
    assert (first.sent.tolist(), first.sent_counts, first.received_counts) == ([0], (0, 1), (0, 0))
    assert (second.sent.tolist(), second.sent_counts, second.received_counts) == ([0, 1], (0, 2), (1, 2))


def test_rank_without_frames_encodes_unused_frame() -> None:
    parts = shared_out([[1, 2, 2]], [0], [0], ranks=3, size=1)
    assert [item.grids.tolist() for _, item in parts] == [[[1, 2, 2]]] * 3
    assert [item.sent_counts for _, item in parts] == [(0, 0, 0), (1, 0, 0), (0, 0, 0)]
    assert [item.received_counts for _, item in parts] == [(0, 1, 0), (0, 0, 0), (0, 0, 0)]


MEDIA: dict[str, tuple[list[list[int]], list[int]]] = {
    "images and sizes": ([[1, 4, 4], [1, 2, 2], [1, 2, 6]], [0, 1, 2]),
    "a long video": ([[7, 4, 2]], [0]),
    "videos": ([[2, 2, 2], [5, 2, 4]], [0, 1]),
    "one shown twice": ([[1, 2, 4], [2, 2, 2], [1, 2, 4], [2, 2, 2]], [0, 1, 0, 1]),
}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("grids", "numbers"), MEDIA.values(), ids=MEDIA)
def test_every_media_token_gets_its_feature(grids: list[list[int]], numbers: list[int], ranks: int) -> None:
    distinct = [grids[numbers.index(number)] for number in range(max(numbers) + 1)]
    lengths = [t * h * w // 4 for t, h, w in distinct]
    features = torch.arange(sum(lengths)).split(lengths)
    cat = torch.cat([features[number] for number in numbers])
    size = len(cat) // ranks + 1
    indices = torch.randperm(size * ranks, generator=torch.Generator().manual_seed(0))[: len(cat)]
    parts = shared_out(grids, numbers, indices.tolist(), ranks, size)
    encoded = [pixels[::4, 0] // 4 for pixels, _ in parts]  # a token's feature is its number
    for pixels, part in parts:
        assert len(pixels) == sum(t * h * w for t, h, w in part.grids.tolist()) > 0
    sent = [local[part.sent].split(list(part.sent_counts)) for local, (_, part) in zip(encoded, parts, strict=True)]
    for rank, (_, part) in enumerate(parts):
        received = torch.cat([rows[rank] for rows in sent])
        assert tuple(len(rows[rank]) for rows in sent) == part.received_counts
        assert torch.equal(received[part.order], cat[indices // size == rank])
        assert torch.equal(part.indices + rank * size, indices[indices // size == rank])
