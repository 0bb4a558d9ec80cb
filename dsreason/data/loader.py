"""From row numbers to the micro-batches of each step, decoded ahead of training by worker processes.

For every step the ranks first learn the token counts of its rows (media headers only, each row once), agree on who takes
which, and decode their own; all ranks then have the same number of micro-batches with the same kinds of media.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import Encoder, SampleTooLong
from dsreason.data.collate import collate
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Batch, EncodedSample
from dsreason.errors import DataError, DsReasonError

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
"""This rank's value in, every rank's value out, by rank. A collective."""

MEDIA_KEYS = {"image": "image_grid_thw", "video": "video_grid_thw"}


@dataclass(frozen=True)
class StepBatches:
    """One global batch as this rank runs it."""

    step: int
    micro_batches: list[Batch]
    """The same number on every rank."""
    num_tokens: int
    """Trained tokens over all ranks and micro-batches."""
    num_input_tokens: int
    """Tokens without padding, over all ranks."""
    num_samples: int
    """Over all ranks."""
    skipped: list[str]
    """Rows left out on any rank, with the reason."""
    data_seconds: float
    """How long the slowest rank waited for its data workers."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be encoded: what a worker returns instead of raising, so that the text stays whole."""

    reason: str
    too_long: bool


class StepLoader:
    """Iterates over the steps from `start_step` to the last one; the result depends on nothing but seed and step."""

    def __init__(
        self,
        dataset: SampleDataset,
        encoder: Encoder,
        order: StepOrder,
        config: SFTConfig,
        *,
        exchange: Exchange,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
    ) -> None:
        self.dataset, self.encoder, self.order, self.config = dataset, encoder, order, config
        self.exchange, self.rank, self.world_size, self.start_step = exchange, rank, world_size, start_step
        self.lengths: dict[int, int] = {}  # token count of every row met so far; equal on all ranks
        self.exchange_seconds = 0.0  # of the current step

    def __iter__(self) -> Iterator[StepBatches]:
        encoded = iter(self._workers(Encoding(self.dataset, self.encoder), self._assignments()))
        for step in range(self.start_step, self.order.num_steps):
            started, self.exchange_seconds = time.perf_counter(), 0.0
            found = next_item(encoded)
            waited = time.perf_counter() - started - self.exchange_seconds
            yield self._step_batches(step, found, waited)

    def _exchange(self, value: Any) -> list[Any]:
        """Collectives are timed apart: in them a rank waits for the others, not for its data."""
        started = time.perf_counter()
        values = self.exchange(value)
        self.exchange_seconds += time.perf_counter() - started
        return values

    def _workers(self, work: Dataset[T], tasks: Iterable[Any]) -> DataLoader[T]:
        """Apply `work` to every task, in order, about `data.prefetch` steps ahead."""
        data = self.config.data
        ahead = {"prefetch_factor": math.ceil(data.prefetch / data.workers)} if data.workers else {}
        return DataLoader(
            work,
            batch_size=None,
            sampler=tasks,
            num_workers=data.workers,
            collate_fn=unchanged,
            generator=torch.Generator(),  # otherwise it draws from the trainer's
            **ahead,
        )

    def _assignments(self) -> Iterator[list[int]]:
        """This rank's rows of each step."""
        unknown = iter(self._workers(Measuring(self.dataset, self.encoder), self._unmeasured()))
        for step in range(self.start_step, self.order.num_steps):
            for measured in self._exchange(next_item(unknown)):
                self.lengths.update(measured)
            rows = self.order.indices(step)
            shares = assign(
                [self.lengths[row] for row in rows],
                self.world_size,
                same_count=self.config.train.max_tokens_per_micro_batch is None,
            )
            yield [rows[i] for i in shares[self.rank]]

    def _unmeasured(self) -> Iterator[list[int]]:
        """This rank's share of the rows of each step whose length no earlier step has asked for."""
        asked: set[int] = set()
        for step in range(self.start_step, self.order.num_steps):
            new = [row for row in dict.fromkeys(self.order.indices(step)) if row not in asked]
            asked.update(new)
            yield new[self.rank :: self.world_size]

    def _step_batches(self, step: int, found: Sequence[EncodedSample | BadRow], waited: float) -> StepBatches:
        started = time.perf_counter()
        samples = [sample for sample in found if isinstance(sample, EncodedSample)]
        error, groups, skipped = None, [], []
        try:
            skipped = self._skipped([bad for bad in found if isinstance(bad, BadRow)])
            groups = self._cut(samples)
        except DataError as caught:
            error = str(caught)
        mine = {
            "error": error,
            "skipped": skipped,
            "kinds": [media_kinds(group) for group in groups],
            "trained": sum(int(sample.loss_mask[1:].sum()) for sample in samples),
            "input": sum(map(len, samples)),
            "samples": len(samples),
            "seconds": waited + time.perf_counter() - started,
        }
        ranks = self._exchange(mine)
        for other in ranks:  # every rank raises, so that none is left waiting
            if other["error"]:
                raise DataError(other["error"])
        skipped = [text for other in ranks for text in other["skipped"]]
        if not any(other["trained"] for other in ranks):
            raise DataError(
                f"step {step + 1} has no trained token; {len(skipped)} rows left out: {'; '.join(skipped[:5])}"
            )
        return StepBatches(
            step=step,
            micro_batches=collate_aligned(groups, [other["kinds"] for other in ranks], self.encoder),
            num_tokens=sum(other["trained"] for other in ranks),
            num_input_tokens=sum(other["input"] for other in ranks),
            num_samples=sum(other["samples"] for other in ranks),
            skipped=skipped,
            data_seconds=max(other["seconds"] for other in ranks),
        )

    def _skipped(self, bad_rows: Sequence[BadRow]) -> list[str]:
        for bad in bad_rows:
            if (self.config.model.on_too_long if bad.too_long else self.config.data.on_bad_row) == "error":
                raise DataError(bad.reason)
        return [bad.reason for bad in bad_rows]

    def _cut(self, samples: Sequence[EncodedSample]) -> list[list[EncodedSample]]:
        train = self.config.train
        if train.max_tokens_per_micro_batch is None:
            return cut_by_count(samples, train.micro_batch_size or 1)
        return cut_by_tokens(samples, train.max_tokens_per_micro_batch)


class Measuring(Dataset[list[tuple[int, int]]]):
    """Row numbers → (row, token count). A bad row counts 0 here and is told when it is encoded."""

    def __init__(self, dataset: SampleDataset, encoder: Encoder) -> None:
        self.dataset, self.encoder = dataset, encoder

    def __getitem__(self, rows: list[int]) -> list[tuple[int, int]]:
        return [(row, self._measure(row)) for row in rows]

    def _measure(self, row: int) -> int:
        try:
            return self.encoder.measure(self.dataset[row])
        except DataError:
            return 0


class Encoding(Dataset[list[EncodedSample | BadRow]]):
    """Row numbers → encoded samples."""

    def __init__(self, dataset: SampleDataset, encoder: Encoder) -> None:
        self.dataset, self.encoder = dataset, encoder

    def __getitem__(self, rows: list[int]) -> list[EncodedSample | BadRow]:
        return [self._encode(row) for row in rows]

    def _encode(self, row: int) -> EncodedSample | BadRow:
        try:
            sample = self.dataset[row]
        except DataError as error:
            return BadRow(str(error), too_long=False)
        try:
            return self.encoder.encode(sample)
        except DataError as error:
            return BadRow(f"{self.dataset.location(row)}: {error}", too_long=isinstance(error, SampleTooLong))


def assign(lengths: Sequence[int], num_ranks: int, *, same_count: bool) -> list[list[int]]:
    """Sample numbers by rank, with sums of lengths as even as longest-first filling makes them.

    With `same_count` no rank has more than one sample more than another. Ties go to the lower rank.

    Example: lengths [8, 7, 6, 5, 4] over 2 ranks → sums 17 and 13 without `same_count`.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    largest = math.ceil(len(lengths) / num_ranks)
    num_largest = len(lengths) - (largest - 1) * num_ranks  # so many ranks may have the larger count
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = sum(len(share) == largest for share in shares)
        room = [
            rank for rank in range(num_ranks) if not same_count or len(shares[rank]) < largest - (full >= num_largest)
        ]
        rank = min(room, key=lambda rank: (sums[rank], rank))
        shares[rank].append(i)
        sums[rank] += lengths[i]
    return shares


def cut_by_count(samples: Sequence[EncodedSample], size: int) -> list[list[EncodedSample]]:
    """Groups of at most `size`, like lengths together (less padding)."""
    ordered = sorted(samples, key=len, reverse=True)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def cut_by_tokens(samples: Sequence[EncodedSample], budget: int) -> list[list[EncodedSample]]:
    """Groups whose padded size, rows x longest row, stays within `budget` tokens."""
    groups: list[list[EncodedSample]] = []
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
    return collate_aligned(groups, exchange([media_kinds(group) for group in groups]), encoder)


def media_kinds(group: Sequence[EncodedSample]) -> list[str]:
    return [kind for kind, key in MEDIA_KEYS.items() if any(key in sample.mm_kwargs for sample in group)]


def collate_aligned(
    groups: Sequence[Sequence[EncodedSample]], kinds_by_rank: Sequence[Sequence[Sequence[str]]], encoder: Encoder
) -> list[Batch]:
    """This rank's `groups` as batches, given which media each micro-batch of each rank has.

    Under ZeRO-3 a forward is a collective: a rank without an image where another has one would leave out the vision
    tower, and the job would hang. Such a rank gets a black one whose tokens are not trained and that nothing before
    them can see. So does text alone: where a parameter has no gradient in the first micro-batch of a step, DeepSpeed
    (0.19.8) goes on adding to the gradient of the step before.
    """
    batches = []
    for i in range(max(map(len, kinds_by_rank))):
        samples = groups[i] if i < len(groups) else [untrained(encoder.pad_id)]
        wanted = {kind for kinds in kinds_by_rank if i < len(kinds) for kind in kinds[i]}
        missing = (wanted or {"image"}) - set(media_kinds(samples))
        dummies = [encoder.dummy(kind) for kind in MEDIA_KEYS if kind in missing]
        batches.append(collate(samples, pad_id=encoder.pad_id, dummies=dummies))
    return batches


def untrained(pad_id: int) -> EncodedSample:
    """Two tokens that count for nothing, for a rank that has fewer micro-batches than another."""
    return EncodedSample(
        id="",
        input_ids=torch.full((2,), pad_id),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        position_ids=torch.arange(2).repeat(3, 1),
        mm_token_type_ids=torch.zeros(2, dtype=torch.int64),
        mm_kwargs={},
    )


def next_item(items: Iterator[T]) -> T:
    """The next result of the workers; a worker that died is an error that says so."""
    try:
        return next(items)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DsReasonError(
            f"a data worker died ({error}); out of memory is the usual reason: lower data.workers or data.prefetch"
        ) from error


def unchanged(item: T) -> T:
    return item
