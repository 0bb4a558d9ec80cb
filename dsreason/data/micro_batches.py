"""Cutting one rank's samples into micro-batches, and keeping the ranks' micro-batches alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dsreason.config.schema import UpdateConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import GRIDS, append_dummies, collate
from dsreason.data.types import Batch, EncodedSample, MediaKind
from dsreason.errors import DataError

S = TypeVar("S", bound=EncodedSample)

Exchange = Callable[[Any], list[Any]]
"""This rank's value in, every rank's value out, by rank. A collective."""


def cut_samples(samples: Sequence[S], train: UpdateConfig) -> list[list[S]]:
    """By tokens where the configuration gives a budget of them, else by number."""
    if train.max_tokens_per_micro_batch is None:
        return cut_by_count(samples, train.micro_batch_size or 1)
    return cut_by_tokens(samples, train.max_tokens_per_micro_batch)


def cut_by_count(samples: Sequence[S], size: int) -> list[list[S]]:
    """Groups of at most `size`, like lengths together (less padding)."""
    ordered = sorted(samples, key=len, reverse=True)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def cut_by_tokens(samples: Sequence[S], budget: int) -> list[list[S]]:
    """Groups whose padded size, rows x longest row, stays within `budget` tokens."""
    groups: list[list[S]] = []
    for sample in sorted(samples, key=len, reverse=True):
        if len(sample) > budget:
            raise DataError(
                f"sample {sample.id!r} has {len(sample)} tokens, more than train.max_tokens_per_micro_batch ({budget}); "
                "raise that, or lower model.max_length and set model.on_too_long"
            )
        if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


def align_micro_batches(groups: Sequence[Sequence[EncodedSample]], encoder: Encoder, exchange: Exchange) -> list[Batch]:
    """Collate, so that every rank has as many micro-batches, with the same kinds of media at each place."""
    batches = [collate(group, pad_id=encoder.pad_id) for group in groups]
    return align_batches(batches, exchange([media_kinds(batch) for batch in batches]), encoder)


def media_kinds(batch: Batch) -> list[MediaKind]:
    return [kind for kind, key in GRIDS.items() if key in batch.mm_kwargs]


def align_batches(
    batches: Sequence[Batch], kinds_by_rank: Sequence[Sequence[Sequence[str]]], encoder: Encoder
) -> list[Batch]:
    """This rank's micro-batches, given which media each micro-batch of each rank has.

    Under ZeRO-3 a forward is a collective: a rank without an image where another has one would leave out the vision
    tower, and the job would hang. Such a rank gets a black one whose tokens are not trained and that nothing before
    them can see. So does text alone: where a parameter has no gradient in the first micro-batch of a step, DeepSpeed
    (0.19.8) goes on adding to the gradient of the step before.
    """
    aligned = []
    for i in range(max(1, *map(len, kinds_by_rank))):  # one, where all rows of a step are left out
        batch = batches[i] if i < len(batches) else collate([padding_sample(encoder.pad_id)], pad_id=encoder.pad_id)
        wanted = {kind for kinds in kinds_by_rank if i < len(kinds) for kind in kinds[i]} or {"image"}
        missing = wanted - set(media_kinds(batch))
        dummies = [encoder.dummy(kind) for kind in GRIDS if kind in missing]
        aligned.append(append_dummies(batch, dummies, pad_id=encoder.pad_id))
    return aligned


def padding_sample(pad_id: int) -> EncodedSample:
    """Two tokens that are not trained, for a rank that has fewer micro-batches than another."""
    return EncodedSample(
        id="",
        input_ids=torch.full((2,), pad_id),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        position_ids=torch.arange(2).repeat(3, 1),
        mm_token_type_ids=torch.zeros(2, dtype=torch.int64),
        mm_kwargs={},
    )
