"""Encoded samples to one right-padded batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsreason.data.types import Batch, EncodedSample


def collate(samples: Sequence[EncodedSample], *, pad_id: int, dummies: Sequence[EncodedSample] = ()) -> Batch:
    """One row per sample, padded on the right; media in row order, those of `dummies` last.

    `dummies` (media that only keep the ranks' vision towers in step) follow the last token of the last row: attention
    is causal, so nothing before them changes, and no token of theirs is trained. Without samples the row is one pad
    token and the dummies.
    """
    if not samples and not dummies:
        raise ValueError("nothing to collate: neither samples nor dummies")
    rows = list(samples) or [_pad_sample(pad_id)]
    rows[-1] = _appended(rows[-1], dummies)
    length = max(len(row) for row in rows)
    attention = [torch.ones(len(row), dtype=torch.int64) for row in rows]
    return Batch(
        ids=tuple(sample.id for sample in samples),
        input_ids=_padded([row.input_ids for row in rows], length, pad_id),
        attention_mask=_padded(attention, length, 0),
        loss_mask=_padded([row.loss_mask for row in rows], length, False),
        position_ids=_padded([row.position_ids for row in rows], length, 0).transpose(0, 1).contiguous(),
        mm_token_type_ids=_padded([row.mm_token_type_ids for row in rows], length, 0),
        mm_kwargs=_joined(row.mm_kwargs for row in rows),
    )


def _pad_sample(pad_id: int) -> EncodedSample:
    """One untrained token, so that a row begins as text does."""
    return EncodedSample(
        id="",
        input_ids=torch.tensor([pad_id]),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        position_ids=torch.zeros(3, 1, dtype=torch.int64),
        mm_token_type_ids=torch.zeros(1, dtype=torch.int64),
        mm_kwargs={},
    )


def _appended(row: EncodedSample, dummies: Sequence[EncodedSample]) -> EncodedSample:
    """The row with the dummies after it, their positions continuing from its largest."""
    positions = [row.position_ids]
    for dummy in dummies:
        positions.append(dummy.position_ids + positions[-1].max() + 1)
    parts = [row, *dummies]
    return EncodedSample(
        id=row.id,
        input_ids=torch.cat([part.input_ids for part in parts]),
        loss_mask=torch.cat([row.loss_mask, *(torch.zeros_like(dummy.loss_mask) for dummy in dummies)]),
        position_ids=torch.cat(positions, dim=1),
        mm_token_type_ids=torch.cat([part.mm_token_type_ids for part in parts]),
        mm_kwargs=_joined(part.mm_kwargs for part in parts),
    )


def _padded(tensors: Sequence[Tensor], length: int, value: int | bool) -> Tensor:
    """Stacks [..., T_i] to [B, ..., length]."""
    return torch.stack([torch.nn.functional.pad(t, (0, length - t.shape[-1]), value=value) for t in tensors])


def _joined(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for mm_kwargs in parts:
        for key, value in mm_kwargs.items():
            found.setdefault(key, []).append(value)
    return {key: torch.cat(values) for key, values in found.items()}
