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
    """How long this rank waited for its data."""


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

    def __iter__(self) -> Iterator[StepBatches]:
        encoded = self._workers(Encoding(self.dataset, self.encoder), self._assignments())
        steps = iter(encoded)
        for step in range(self.start_step, self.order.num_steps):
            started = time.perf_counter()
            found = next_item(steps)
            yield self._step_batches(step, found, started)

    def _workers(self, work: Dataset[T], tasks: Iterable[Any]) -> DataLoader[T]:
        """Apply `work` to every task, in order, about `data.prefetch` steps ahead."""
        data = self.config.data
        ahead = {"prefetch_factor": math.ceil(data.prefetch / data.workers)} if data.workers else {}
        return DataLoader(
            work, batch_size=None, sampler=tasks, num_workers=data.workers, collate_fn=unchanged, **ahead
        )

    def _assignments(self) -> Iterator[list[int]]:
        """This rank's rows of each step."""
        unknown = iter(self._workers(Measuring(self.dataset, self.encoder), self._unmeasured()))
        for step in range(self.start_step, self.order.num_steps):
            for measured in self.exchange(next_item(unknown)):
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

    def _step_batches(self, step: int, found: Sequence[EncodedSample | BadRow], started: float) -> StepBatches:
        samples = [sample for sample in found if isinstance(sample, EncodedSample)]
        error, groups = None, []
        try:
            skipped = self._skipped([bad for bad in found if isinstance(bad, BadRow)])
            groups = self._cut(samples)
        except DataError as caught:
            error = str(caught)
        facts = {
            "error": error,
            "trained": sum(int(sample.loss_mask[1:].sum()) for sample in samples),
            "input": sum(map(len, samples)),
            "samples": len(samples),
            "skipped": [] if error else skipped,
        }
        all_facts = self.exchange(facts)
        for other in all_facts:
            if other["error"]:
                raise DataError(other["error"])
        skipped = [text for other in all_facts for text in other["skipped"]]
        num_tokens = sum(other["trained"] for other in all_facts)
        if num_tokens == 0:
            raise DataError(f"step {step + 1} has no trained token: {len(skipped)} rows left out: {'; '.join(skipped[:5])}")
        return StepBatches(
            step=step,
            micro_batches=align_micro_batches(groups, self.encoder, self.exchange),
            num_tokens=num_tokens,
            num_input_tokens=sum(other["input"] for other in all_facts),
            num_samples=sum(other["samples"] for other in all_facts),
            skipped=skipped,
            data_seconds=time.perf_counter() - started,
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
            rank
            for rank in range(num_ranks)
            if not same_count or len(shares[rank]) < largest - (full >= num_largest)
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


def align_micro_batches(
    groups: Sequence[Sequence[EncodedSample]], encoder: Encoder, exchange: Exchange
) -> list[Batch]:
    """Collate, so that every rank has as many micro-batches, with the same kinds of media at each place.

    Under ZeRO-3 a forward is a collective: a rank without an image where another has one would leave out the vision
    tower, and the job would hang. Such a rank gets a black one whose tokens are not trained and that nothing before
    them can see.
    """
    kinds = [[kind for kind, key in MEDIA_KEYS.items() if any(key in s.mm_kwargs for s in group)] for group in groups]
    by_rank = exchange(kinds)
    batches = []
    for i in range(max(map(len, by_rank))):
        here = kinds[i] if i < len(kinds) else []
        wanted = [kind for kind in MEDIA_KEYS if any(i < len(other) and kind in other[i] for other in by_rank)]
        dummies = [encoder.dummy(kind) for kind in wanted if kind not in here]
        samples = groups[i] if i < len(groups) else [untrained(encoder.pad_id)]
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
