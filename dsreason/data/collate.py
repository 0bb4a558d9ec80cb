"""Functions that collate encoded samples into a micro-batch: one packed row, or several padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dsreason.data.types import TOKEN_TYPES, Batch, EncodedSample, MediaKind, MediaTokens, Segment

S = TypeVar("S", bound=EncodedSample)

PIXELS: dict[MediaKind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS: dict[MediaKind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}


def pack(samples: Sequence[EncodedSample]) -> Batch:
    """Pack one or more samples into a row without padding; a parent appears only once, before the first sample that continues it.

    `targets` follow the order of the samples, except that samples with the same parent are moved together.
    """
    row: list[EncodedSample] = []
    segments: list[Segment] = []
    targets: list[Tensor] = []
    predictors: list[Tensor] = []
    parent_segments: dict[int, int] = {}

    def add(sample: EncodedSample, parent: int | None = None) -> None:
        start = segments[-1].end if segments else 0
        row.append(sample)
        segments.append(Segment(start, len(sample), parent))

    for sample in group_by_parent(samples):
        if sample.parent is None:
            add(sample)
            trained = 1 + sample.loss_mask[1:].nonzero().flatten()
            predicting = segments[-1].start + trained - 1
        else:
            if id(sample.parent) not in parent_segments:
                add(sample.parent)
                parent_segments[id(sample.parent)] = len(segments) - 1
            parent = parent_segments[id(sample.parent)]
            add(sample, parent)
            trained = sample.loss_mask.nonzero().flatten()
            predicting = segments[-1].start + trained - 1
            predicting[trained == 0] = segments[parent].end - 1
        targets.append(segments[-1].start + trained)
        predictors.append(predicting)
    mm_kwargs, numbers = _join([sample.mm_kwargs for sample in row])
    return Batch(
        ids=tuple(sample.id for sample in samples),
        input_ids=torch.cat([sample.input_ids for sample in row])[None],
        attention_mask=None,
        targets=torch.cat(targets),
        predictors=torch.cat(predictors),
        position_ids=torch.cat([sample.position_ids for sample in row], dim=1)[:, None],
        mm_token_type_ids=torch.cat([sample.mm_token_type_ids for sample in row])[None],
        mm_kwargs=mm_kwargs,
        media_numbers=numbers,
        segments=tuple(segments),
    )


def group_by_parent(samples: Sequence[S]) -> list[S]:
    """Move samples with the same parent next to each other, after the first of them; otherwise, keep the order."""
    firsts: dict[int, int] = {}
    order = [
        firsts.setdefault(i if sample.parent is None else id(sample.parent), i) for i, sample in enumerate(samples)
    ]
    return [samples[i] for i in sorted(range(len(samples)), key=order.__getitem__)]


def collate(
    samples: Sequence[EncodedSample], *, pad_id: int, padding_side: Literal["left", "right"] = "right"
) -> Batch:
    """Collate one or more samples into padded rows; a row starts with the parent's tokens, and media are in row order."""
    rows = [join_parent(sample) for sample in samples]
    padded = partial(pad_sequence, batch_first=True, padding_side=padding_side)
    mm_kwargs, numbers = _join([row.mm_kwargs for row in rows])
    input_ids = padded([row.input_ids for row in rows], padding_value=pad_id)
    attention_mask = padded([torch.ones_like(row.input_ids) for row in rows])
    targets = padded([row.loss_mask for row in rows])
    targets &= attention_mask.cumsum(1) > 1  # the first token of a row has no predictor
    target_indices = targets.flatten().nonzero().flatten()
    return Batch(
        ids=tuple(row.id for row in rows),
        input_ids=input_ids,
        attention_mask=attention_mask,
        targets=target_indices,
        predictors=target_indices - 1,
        position_ids=padded([row.position_ids.T for row in rows]).permute(2, 0, 1).contiguous(),
        mm_token_type_ids=padded([row.mm_token_type_ids for row in rows]),
        mm_kwargs=mm_kwargs,
        media_numbers=numbers,
    )


def join_parent(sample: S) -> S:
    """Return the sample with its parent's tokens and media prepended."""
    parent = sample.parent
    if parent is None:
        return sample
    return replace(
        sample,
        input_ids=torch.cat([parent.input_ids, sample.input_ids]),
        loss_mask=torch.cat([torch.zeros_like(parent.loss_mask), sample.loss_mask]),
        position_ids=torch.cat([parent.position_ids, sample.position_ids], dim=1),
        mm_token_type_ids=torch.cat([parent.mm_token_type_ids, sample.mm_token_type_ids]),
        mm_kwargs=join_media([parent.mm_kwargs, sample.mm_kwargs]),
        parent=None,
    )


def append_dummies(batch: Batch, dummies: Sequence[EncodedSample], *, pad_id: int) -> Batch:
    """Append untrained media whose only purpose is to keep the vision towers of all ranks in step.

    In a packed row, each dummy becomes a separate sample at the end. In padded rows, the dummies follow the tokens of the last
    row, and their positions continue after the row's largest position; attention is causal, so earlier tokens do not change.
    """
    if not dummies:
        return batch
    mm_kwargs, numbers = _join([dummy.mm_kwargs for dummy in dummies])
    for kind, batch_numbers in batch.media_numbers.items():
        dummy_numbers = numbers.get(kind, ())
        numbers[kind] = batch_numbers + tuple(max(batch_numbers) + 1 + number for number in dummy_numbers)
    batch = replace(batch, mm_kwargs=join_media([batch.mm_kwargs, mm_kwargs]), media_numbers=numbers)
    return append_segments(batch, dummies) if batch.segments else _append_to_last_row(batch, dummies, pad_id)


def append_segments(batch: Batch, samples: Sequence[EncodedSample]) -> Batch:
    """Append untrained samples to a packed row. The caller joins the samples' media with the media of the batch."""
    segments = list(batch.segments)
    for sample in samples:
        segments.append(Segment(segments[-1].end, len(sample)))
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, *[sample.input_ids[None] for sample in samples]], dim=1),
        position_ids=torch.cat([batch.position_ids, *[sample.position_ids[:, None] for sample in samples]], dim=2),
        mm_token_type_ids=torch.cat(
            [batch.mm_token_type_ids, *[sample.mm_token_type_ids[None] for sample in samples]], dim=1
        ),
        segments=tuple(segments),
        num_fillers=batch.num_fillers + sum(map(len, samples)),
    )


def make_padding_sample(pad_id: int, length: int = 2) -> EncodedSample:
    """Return an untrained sample of padding tokens, which fills the end of a row, or a batch that a rank has no samples for."""
    return EncodedSample(
        id="",
        input_ids=torch.full((length,), pad_id),
        loss_mask=torch.zeros(length, dtype=torch.bool),
        position_ids=torch.arange(length).repeat(3, 1),
        mm_token_type_ids=torch.zeros(length, dtype=torch.int64),
        mm_kwargs={},
    )


def _append_to_last_row(batch: Batch, samples: Sequence[EncodedSample], pad_id: int) -> Batch:
    assert batch.attention_mask is not None
    mask, width = batch.attention_mask, batch.input_ids.shape[1]
    start = int(mask[-1].sum())
    positions = [batch.position_ids[:, -1, :start]]
    for sample in samples:
        positions.append(sample.position_ids + positions[-1].max() + 1)
    end = start + sum(map(len, samples))
    more = max(0, end - width)

    def append_values(rows: Tensor, values: Tensor, value: int = 0) -> Tensor:
        """Widen `rows` […, B, T] if necessary, and write `values` […, N] after the tokens of the last row."""
        rows = pad(rows, (0, more), value=value)
        rows[..., -1, start:end] = values
        return rows

    def convert_indices(indices: Tensor) -> Tensor:
        """Convert indices into the flattened rows to indices into the flattened, wider rows."""
        return indices + indices // width * more

    ids = torch.cat([sample.input_ids for sample in samples])
    types = torch.cat([sample.mm_token_type_ids for sample in samples])
    return replace(
        batch,
        input_ids=append_values(batch.input_ids, ids, pad_id),
        attention_mask=append_values(mask, torch.ones_like(ids)),
        targets=convert_indices(batch.targets),
        predictors=convert_indices(batch.predictors),
        position_ids=append_values(batch.position_ids, torch.cat(positions[1:], dim=1)),
        mm_token_type_ids=append_values(batch.mm_token_type_ids, types),
        num_fillers=batch.num_fillers + len(ids),
    )


def find_media_tokens(batch: Batch) -> MediaTokens | None:
    """Return the layout of a batch's media, or None if the batch has no media. Grids and token types must be on the host."""
    grids: list[Tensor] = []
    numbers: list[int] = []
    indices: list[Tensor] = []
    for kind, key in GRIDS.items():
        if key not in batch.mm_kwargs:
            continue
        shown_numbers: Sequence[int] = batch.media_numbers.get(kind) or range(len(batch.mm_kwargs[key]))
        offset = sum(map(len, grids))
        grids.append(batch.mm_kwargs[key][[shown_numbers.index(number) for number in range(max(shown_numbers) + 1)]])
        numbers += [offset + number for number in shown_numbers]
        indices.append((batch.mm_token_type_ids.flatten() == TOKEN_TYPES[kind]).nonzero().flatten())
    return MediaTokens(torch.cat(grids), tuple(numbers), torch.cat(indices)) if grids else None


def join_pixels(batch: Batch) -> Tensor:
    """Concatenate the pixel values `[patches, dim]` of all distinct media, in the order of `MediaTokens.grids`."""
    pixels = [batch.mm_kwargs[key] for key in PIXELS.values() if key in batch.mm_kwargs]
    return pixels[0] if len(pixels) == 1 else torch.cat(pixels)


def _join(parts: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Join the rows' `mm_kwargs`, without repeating identical tensors; return the batch's `mm_kwargs` and `media_numbers`."""
    firsts: dict[int, int] = {}
    totals = dict.fromkeys(PIXELS, 0)
    numbers: dict[str, tuple[int, ...]] = {}
    distinct = []
    for part in parts:
        repeated = set()
        for kind, key in PIXELS.items():
            if key not in part:
                continue
            pixels, count = id(part[key]), len(part[GRIDS[kind]])
            if pixels in firsts:
                repeated.add(key)
            else:
                firsts[pixels] = totals[kind]
                totals[kind] += count
            numbers[kind] = numbers.get(kind, ()) + tuple(range(firsts[pixels], firsts[pixels] + count))
        distinct.append({key: value for key, value in part.items() if key not in repeated})
    return join_media(distinct), numbers


def join_media(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the tensors of several `mm_kwargs`, key by key; if only one of them has a key, its tensor is not copied."""
    by_key: dict[str, list[Tensor]] = {}
    for part in parts:
        for key, value in part.items():
            by_key.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else torch.cat(values) for key, values in by_key.items()}
