"""Encoded samples to one right-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dsreason.data.types import Batch, EncodedSample, MediaKind

PIXELS: dict[MediaKind, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS: dict[MediaKind, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}


padded = partial(pad_sequence, batch_first=True)


def collate(rows: Sequence[EncodedSample], *, pad_id: int) -> Batch:
    """At least one sample, padded on the right; media in row order."""
    mm_kwargs, numbers = _join([row.mm_kwargs for row in rows])
    return Batch(
        ids=tuple(row.id for row in rows),
        input_ids=padded([row.input_ids for row in rows], padding_value=pad_id),
        attention_mask=padded([torch.ones_like(row.input_ids) for row in rows]),
        loss_mask=padded([row.loss_mask for row in rows]),
        position_ids=padded([row.position_ids.T for row in rows]).permute(2, 0, 1).contiguous(),
        mm_token_type_ids=padded([row.mm_token_type_ids for row in rows]),
        mm_kwargs=mm_kwargs,
        media_numbers=numbers,
    )


def append_dummies(batch: Batch, dummies: Sequence[EncodedSample], *, pad_id: int) -> Batch:
    """The batch with media that only keep the ranks' vision towers in step.

    They follow the last token of the last row: attention is causal, so nothing before them changes, and no token of
    theirs is trained. Their positions continue from the row's largest.
    """
    if not dummies:
        return batch
    start = int(batch.attention_mask[-1].sum())
    positions = [batch.position_ids[:, -1, :start]]
    for dummy in dummies:
        positions.append(dummy.position_ids + positions[-1].max() + 1)
    ids = torch.cat([dummy.input_ids for dummy in dummies])
    types = torch.cat([dummy.mm_token_type_ids for dummy in dummies])
    mm_kwargs, numbers = _join([dummy.mm_kwargs for dummy in dummies])
    for kind, own in batch.media_numbers.items():
        numbers[kind] = own + tuple(max(own) + 1 + number for number in numbers.get(kind, ()))

    def appended(rows: Tensor, more: Tensor, padding_value: int = 0) -> Tensor:
        """`rows` [B, T, …] with `more` [N, …] behind the tokens of the last one."""
        return padded([*rows[:-1], torch.cat([rows[-1, :start], more])], padding_value=padding_value)

    rows_of_positions = appended(batch.position_ids.permute(1, 2, 0), torch.cat(positions[1:], dim=1).T)
    return replace(
        batch,
        input_ids=appended(batch.input_ids, ids, pad_id),
        attention_mask=appended(batch.attention_mask, torch.ones_like(ids)),
        loss_mask=appended(batch.loss_mask, torch.zeros_like(ids, dtype=torch.bool)),
        position_ids=rows_of_positions.permute(2, 0, 1).contiguous(),
        mm_token_type_ids=appended(batch.mm_token_type_ids, types),
        mm_kwargs=_cat([batch.mm_kwargs, mm_kwargs]),
        media_numbers=numbers,
    )


def _join(parts: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """`mm_kwargs` and `media_numbers` of a batch whose rows have these `mm_kwargs`; shared is what is the same tensor."""
    firsts: dict[int, int] = {}
    totals = dict.fromkeys(PIXELS, 0)
    numbers: dict[str, tuple[int, ...]] = {}
    distinct = []
    for part in parts:
        again = set()
        for kind, key in PIXELS.items():
            if key not in part:
                continue
            pixels, count = id(part[key]), len(part[GRIDS[kind]])
            if pixels in firsts:
                again.add(key)
            else:
                firsts[pixels] = totals[kind]
                totals[kind] += count
            numbers[kind] = numbers.get(kind, ()) + tuple(range(firsts[pixels], firsts[pixels] + count))
        distinct.append({key: value for key, value in part.items() if key not in again})
    return _cat(distinct), numbers


def _cat(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for key, value in part.items():
            found.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else torch.cat(values) for key, values in found.items()}
