"""Functions that group a rank's samples into micro-batches and keep the micro-batches aligned across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dsreason.config.schema import RunConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import GRIDS, append_dummies, collate, group_by_parent, make_padding_sample, pack
from dsreason.data.rank_parts import take_part
from dsreason.data.types import Batch, EncodedSample
from dsreason.errors import DataError
from dsreason.job.part_of import WHOLE, PartOf
from dsreason.monitor.flops import Work

S = TypeVar("S", bound=EncodedSample)
T = TypeVar("T")

Exchange = Callable[[Any], list[Any]]
"""Collective operation that takes this rank's value and returns a list of all ranks' values."""


def cut_samples(samples: Sequence[S], config: RunConfig) -> list[list[S]]:
    """Group samples into micro-batches by token count if the configuration sets a token budget, else by number of samples."""
    budget, key = config.token_budget
    if budget is None:
        return cut_by_count(samples, config.train.micro_batch_size or 1)
    for sample in samples:
        if count_with_parent(sample) > budget:
            raise DataError(
                f"sample {sample.id!r} has {count_with_parent(sample)} tokens, but a micro-batch may have only {budget} ({key}); "
                f"raise {key}, or lower model.max_length and set model.on_too_long"
            )
    return cut_into_rows(samples, budget) if config.train.packing else cut_by_tokens(samples, budget)


def describe_forward_size(config: RunConfig) -> str:
    """Describe the size of one forward pass for the log: `one packed row of up to 4096 tokens (model.max_length)`."""
    rows = "one packed row" if config.train.packing else "padded rows"
    budget, key = config.token_budget
    size = f"{budget} tokens" if budget is not None else f"{config.train.micro_batch_size or 1} samples"
    return f"{rows} of up to {size} ({key})"


def cut_by_count(samples: Sequence[S], size: int) -> list[list[S]]:
    """Cut samples into groups of at most `size`. To save work, samples with the same parent or similar lengths are grouped."""
    ordered = group_by_parent(sorted(samples, key=count_with_parent, reverse=True))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def cut_by_tokens(samples: Sequence[S], budget: int) -> list[list[S]]:
    """Group samples so that the padded size (number of rows x length of the longest row) is at most `budget` tokens."""
    groups: list[list[S]] = []
    for sample in sorted(samples, key=count_with_parent, reverse=True):
        if not groups or (len(groups[-1]) + 1) * count_with_parent(groups[-1][0]) > budget:
            groups.append([])
        groups[-1].append(sample)
    return groups


def cut_into_rows(samples: Sequence[S], budget: int) -> list[list[S]]:
    """Group samples by first-fit decreasing. A group has at most `budget` tokens; a parent counts once per group.

    Samples with the same parent stay together as far as the budget allows. If they need several groups, each repeats the parent.

    Example: lengths 5, 4, 3, 2 and a budget of 8 → (5, 3), (4, 2).
    """
    families: dict[int, list[S]] = {}
    for sample in samples:
        families.setdefault(id(sample.parent or sample), []).append(sample)
    parts: list[tuple[int, list[S]]] = []
    for family in families.values():
        shared = len(family[0].parent or ())
        cut = fit_first([(len(sample), [sample]) for sample in family], budget - shared)
        parts += [(shared + sum(map(len, part)), part) for part in cut]
    return fit_first(parts, budget)


def fit_first(parts: Sequence[tuple[int, list[T]]], budget: int) -> list[list[T]]:
    """Add each part `(size, samples)`, largest first, to the first group that has room for it."""
    groups: list[list[T]] = []
    rooms: list[int] = []
    for size, samples in sorted(parts, key=lambda part: part[0], reverse=True):
        index = next((i for i, room in enumerate(rooms) if room >= size), None)
        if index is None:
            index = len(groups)
            groups.append([])
            rooms.append(budget)
        groups[index] += samples
        rooms[index] -= size
    return groups


def count_with_parent(sample: EncodedSample) -> int:
    """Return the number of tokens of the sample and its parent."""
    return len(sample) + len(sample.parent or ())


def compute_work(groups: Sequence[Sequence[EncodedSample]], *, packing: bool) -> Work:
    """Compute the work for micro-batches. A media item that occurs several times in a micro-batch is encoded only once.

    Example: a prompt of 100 tokens with completions of 10 and 20 → spans (100, 0), (10, 100), (20, 100) if packed, and
    (110, 0), (120, 0) otherwise.
    """
    work = Work()
    for group in groups:
        parents = {id(sample.parent): sample.parent for sample in group if sample.parent is not None}
        by_id = {id(sample): sample for sample in group} | parents
        if packing:
            work.spans += [(len(parent), 0) for parent in parents.values()]
        for sample in group:
            before = 0 if sample.parent is None else len(sample.parent)
            work.spans.append((len(sample), before) if packing else (before + len(sample), 0))
            # The first token of a sample without a parent has no predictor.
            work.trained_tokens += int(sample.loss_mask[int(sample.parent is None) :].sum())
        for sample in by_id.values():
            for key in GRIDS.values():
                if key in sample.mm_kwargs:
                    work.grids += [(t, h, w) for t, h, w in sample.mm_kwargs[key].tolist()]
    return work


def make_batch(samples: Sequence[EncodedSample], *, packing: bool, pad_id: int) -> Batch:
    return pack(samples) if packing else collate(samples, pad_id=pad_id)


def align_micro_batches(
    groups: Sequence[Sequence[EncodedSample]],
    encoder: Encoder,
    exchange: Exchange,
    *,
    packing: bool,
    part: PartOf = WHOLE,
) -> list[Batch]:
    """Make a batch from each group, and add empty batches until all ranks have the same number.

    If the model accepts media, every batch contains media. `part` is this rank's part of each row; ranks that compute a row
    together have the same `groups`.
    """
    batches = [make_batch(group, packing=packing, pad_id=encoder.pad_id) for group in groups]
    return align_batches(batches, exchange(len(batches)), encoder, packing=packing, part=part)


def align_batches(
    batches: Sequence[Batch],
    counts: Sequence[int],
    encoder: Encoder,
    *,
    packing: bool,
    part: PartOf = WHOLE,
) -> list[Batch]:
    """Add the empty micro-batches and dummy images that this rank needs, given the number of micro-batches on each rank.

    Under ZeRO-3, a forward pass is a collective operation: if a rank without media skipped the vision tower, the job would hang.
    An untrained black image, to which no earlier token attends, is therefore appended to each batch without media.

    The image is appended even if no rank has media, for two reasons. If a parameter has no gradient in a step's first
    micro-batch, DeepSpeed (0.19.8) keeps adding to the previous step's gradient; and if a forward pass skips some modules,
    DeepSpeed traces the modules again.
    """
    aligned = []
    for i in range(max(1, *counts)):  # each rank needs at least one batch, even if all of a step's rows are skipped
        batch = batches[i] if i < len(batches) else make_empty_batch(encoder.pad_id, packing=packing)
        if encoder.sees and not any(key in batch.mm_kwargs for key in GRIDS.values()):
            batch = append_dummies(batch, [encoder.build_dummy("image")], pad_id=encoder.pad_id)
        aligned.append(take_part(batch, part, encoder.pad_id))
    return aligned


def make_empty_batch(pad_id: int, *, packing: bool) -> Batch:
    return make_batch([make_padding_sample(pad_id)], packing=packing, pad_id=pad_id)
