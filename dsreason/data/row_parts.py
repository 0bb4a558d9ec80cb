"""One rank's part of a packed row that the ranks of a group compute together: its tokens, targets and media.

All of it is worked out on the host, before anything is on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsreason.data.collate import GRIDS, PIXELS, append_segments, padding_sample
from dsreason.data.types import TOKEN_TYPES, Batch, MediaPart, RowPart
from dsreason.job.part_of import PartOf


def take_part(batch: Batch, part: PartOf, pad_id: int) -> Batch:
    """The row, padded so that its parts have one length, with what the rank `part` computes of it.

    The padding is a sample of its own at the end. Of the pixels there remain those that the rank encodes.
    """
    if part.total == 1:
        return batch
    assert batch.segments, "only packed rows are computed by several ranks together"
    missing = -batch.input_ids.shape[1] % part.total
    if missing:
        batch = append_segments(batch, [padding_sample(pad_id, missing)])
    size = batch.input_ids.shape[1] // part.total
    start = part.number * size
    targets = (batch.predictors // size == part.number).nonzero().flatten()
    mm_kwargs, media = dict(batch.mm_kwargs), {}
    for kind in (kind for kind in PIXELS if kind in batch.media_numbers):  # one order on all ranks
        numbers = batch.media_numbers[kind]
        shown_by = (batch.mm_token_type_ids[0] == TOKEN_TYPES[kind]).nonzero().flatten() // size
        pixels, media[kind] = share_media(
            batch.mm_kwargs[PIXELS[kind]], batch.mm_kwargs[GRIDS[kind]], numbers, shown_by, part
        )
        mm_kwargs[PIXELS[kind]] = pixels
    row_part = RowPart(start, start + size, targets, batch.predictors[targets] - start, media)
    return replace(batch, mm_kwargs=mm_kwargs, part=row_part)


def share_media(
    pixels: Tensor, grids: Tensor, numbers: Sequence[int], shown_by: Tensor, part: PartOf
) -> tuple[Tensor, MediaPart]:
    """The pixels that the rank `part` encodes, and who shows their features.

    A rank that gets no frame encodes the first one too, whose features nobody takes from it: under ZeRO-3 all ranks
    run the vision tower.

    Args:
        pixels: `[patches, dim]` of the distinct media.
        grids: `[shown media, 3]`, in patches.
        numbers: `Batch.media_numbers` of the kind.
        shown_by: `[tokens]` of the kind, in the order of the row: which rank has them.
    """
    shown: list[list[int]] = grids.tolist()
    distinct = [shown[numbers.index(number)] for number in range(max(numbers) + 1)]
    frames = torch.tensor([(medium, h * w) for medium, (t, h, w) in enumerate(distinct) for _ in range(t)])
    sizes = frames[:, 1]
    ends = sizes.cumsum(0)
    ranks = (2 * ends - sizes) * part.total // (2 * int(ends[-1]))  # by the middle of each frame
    own = (ranks == part.number).nonzero().flatten()
    encoded = own if len(own) else torch.tensor([0])
    first, last = int(encoded[0]), int(encoded[-1])
    own_pixels = pixels[int(ends[first] - sizes[first]) : int(ends[last])]
    media, counts = frames[encoded, 0].unique_consecutive(return_counts=True)
    pieces = [(count, *distinct[medium][1:]) for medium, count in zip(media.tolist(), counts.tolist(), strict=True)]

    per_token = sum(t * h * w for t, h, w in shown) // len(shown_by)
    encoded_by = ranks.repeat_interleave(sizes // per_token)
    lengths = [t * h * w // per_token for t, h, w in distinct]
    of_media = torch.arange(sum(lengths)).split(lengths)
    features = torch.cat([of_media[number] for number in numbers])  # that each token shows
    begin = int((encoded_by < part.number).sum())
    mine = encoded_by[features] == part.number
    sent = [features[mine & (shown_by == rank)] - begin for rank in range(part.total)]
    sources = encoded_by[features[shown_by == part.number]]
    return own_pixels, MediaPart(
        grid=torch.tensor(pieces),
        sent=torch.cat(sent),
        sent_counts=tuple(map(len, sent)),
        received_counts=tuple(sources.bincount(minlength=part.total).tolist()),
        order=sources.argsort(stable=True).argsort(),
    )
