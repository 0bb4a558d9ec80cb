"""Functions that extract one rank's tokens, targets and media from a packed row that several ranks share.

All computations run on the host, before any tensor is moved to a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dsreason.data.collate import PIXELS, append_segments, find_media_tokens, join_pixels, make_padding_sample
from dsreason.data.types import Batch, MediaPart, MediaTokens, RowPart
from dsreason.job.part_of import PartOf


def take_part(batch: Batch, part: PartOf, pad_id: int) -> Batch:
    """Pad the batch's row to a multiple of the number of ranks, and set the batch's `part` to this rank's part of the row.

    The padding is a separate sample at the end of the row. The returned batch has only the pixel values that this rank encodes.
    """
    if part.total == 1:
        return batch
    assert batch.segments, "only packed rows can be split among ranks"
    missing = -batch.input_ids.shape[1] % part.total
    if missing:
        batch = append_segments(batch, [make_padding_sample(pad_id, missing)])
    size = batch.input_ids.shape[1] // part.total
    start = part.number * size
    targets = (batch.predictors // size == part.number).nonzero().flatten()
    row_part = RowPart(start, start + size, targets, batch.predictors[targets] - start, None)
    media = find_media_tokens(batch)
    if media is None:
        return replace(batch, part=row_part)
    pixels, media_part = share_media(join_pixels(batch), media, size, part)
    mm_kwargs = {key: value for key, value in batch.mm_kwargs.items() if key not in PIXELS.values()}
    return replace(batch, mm_kwargs=mm_kwargs | {PIXELS["image"]: pixels}, part=replace(row_part, media=media_part))


def share_media(pixels: Tensor, media: MediaTokens, size: int, part: PartOf) -> tuple[Tensor, MediaPart]:
    """Return the pixel values that the rank for `part` encodes, and the plan for exchanging the features.

    Under ZeRO-3, all ranks must run the vision tower. A rank to which no frame is assigned therefore encodes the first frame, and
    no rank uses the resulting features.

    Args:
        pixels: `[patches, dim]`, pixel values for the distinct media.
        size: number of tokens in each rank's part of the row.
    """
    distinct: list[list[int]] = media.grids.tolist()
    frames = torch.tensor([(number, h * w) for number, (t, h, w) in enumerate(distinct) for _ in range(t)])
    sizes = frames[:, 1]
    ends = sizes.cumsum(0)
    ranks = (2 * ends - sizes) * part.total // (2 * int(ends[-1]))  # a frame's middle patch determines its rank
    local = (ranks == part.number).nonzero().flatten()
    encoded = local if len(local) else torch.tensor([0])
    first, last = int(encoded[0]), int(encoded[-1])
    local_pixels = pixels[int(ends[first] - sizes[first]) : int(ends[last])]
    numbers, counts = frames[encoded, 0].unique_consecutive(return_counts=True)
    pieces = [(count, *distinct[number][1:]) for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)]

    encoded_by = ranks.repeat_interleave(sizes // media.patches_per_token)
    features = media.repeat_features(torch.arange(len(encoded_by)))  # index of each placeholder's feature
    shown_by = media.indices // size
    begin = int((encoded_by < part.number).sum())
    encoded_here = encoded_by[features] == part.number
    sent = [features[encoded_here & (shown_by == rank)] - begin for rank in range(part.total)]
    sources = encoded_by[features[shown_by == part.number]]
    return local_pixels, MediaPart(
        grids=torch.tensor(pieces),
        sent=torch.cat(sent),
        sent_counts=tuple(map(len, sent)),
        received_counts=tuple(sources.bincount(minlength=part.total).tolist()),
        order=sources.argsort(stable=True).argsort(),
        indices=media.indices[shown_by == part.number] - part.number * size,
    )
