"""From row numbers to the micro-batches of each step, decoded ahead of training by worker processes.

For every step the ranks first learn the token counts of its rows (media headers only, each row once), agree on who takes
which, and decode their own; all ranks then have the same number of micro-batches with the same kinds of media.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import RawArray
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from platform import python_version
from traceback import format_exception_only
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from dsreason.config.schema import RunConfig
from dsreason.config.schema_data import DataConfig
from dsreason.data.chat import Encoder, SampleTooLong
from dsreason.data.micro_batches import Exchange, align_batches, cut_samples, make_batch, work_of
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Batch, EncodedSample, Sample
from dsreason.errors import DataError, DsReasonError
from dsreason.job.failures import dead_worker_as_error
from dsreason.job.part_of import PartOf
from dsreason.monitor.flops import Work
from dsreason.screen import say

T = TypeVar("T")

START_SECONDS = 120.0
"""Within which a data worker has to start; it takes milliseconds."""


@dataclass(frozen=True)
class StepBatches:
    """One global batch as this rank runs it."""

    step: int
    micro_batches: list[Batch]
    """The same number on every rank."""
    work: Work
    """In them, of this rank."""
    num_tokens: int
    """Trained tokens over all ranks and micro-batches (1 if there is none: it divides the loss)."""
    num_input_tokens: int
    """Tokens without padding, over all ranks."""
    num_samples: int
    """Over all ranks."""
    skipped: list[str]
    """Rows left out on any rank, with the reason."""
    data_seconds: float
    """How long the slowest rank waited for its data workers."""


def read_row(dataset: SampleDataset, row: int, use: Callable[[Sample], T]) -> T | DataError:
    """`use(sample)` of the row, or an error that says where the row is; returned, as torch would add a worker's traceback."""
    try:
        sample = dataset[row]
    except DataError as error:  # it names the row
        return error
    try:
        return use(sample)
    except DataError as error:
        return type(error)(f"{dataset.location(row)}: {error}")


def read_rows(dataset: SampleDataset, use: Callable[[Sample], T], rows: Sequence[int]) -> list[T | DataError]:
    return [read_row(dataset, row, use) for row in rows]


def first_fatal(bad: Iterable[DataError], config: RunConfig) -> str | None:
    """The text of the first error that `data.on_bad_row` or `model.on_too_long` does not allow to skip, if there is one."""
    policies = {True: config.model.on_too_long, False: config.data.on_bad_row}
    return next((str(error) for error in bad if policies[isinstance(error, SampleTooLong)] == "error"), None)


class Steps(Protocol):
    """Which rows each step sees."""

    @property
    def num_steps(self) -> int: ...

    def indices(self, step: int) -> list[int]:
        """Row numbers of the global batch of 0-based `step`."""


@dataclass
class StepLoader:
    """Iterates over the steps from `start_step` to the last one; the result depends on nothing but seed and step."""

    dataset: SampleDataset
    encoder: Encoder
    order: Steps
    config: RunConfig
    exchange: Exchange
    rank: int = 0
    world_size: int = 1
    ranks_per_row: int = 1
    """So many ranks, one behind the other, have the same rows, of which each computes a part."""
    start_step: int = 0
    lengths: dict[int, int] = field(default_factory=dict, init=False)
    """Token count of every row met so far; equal on all ranks."""
    exchange_seconds: float = field(default=0.0, init=False)
    """Of the current step."""

    def __iter__(self) -> Iterator[StepBatches]:
        shares = decode_ahead(self._encode_share(), self._assignments(), self.config.data)
        for step in range(self.start_step, self.order.num_steps):
            started, self.exchange_seconds = time.perf_counter(), 0.0
            share = next(shares)
            waited = time.perf_counter() - started - self.exchange_seconds
            yield self._step_batches(step, share, waited)

    def _encode_share(self) -> Callable[[Sequence[int]], Share]:
        """Return what workers do with a rank's rows of a step; picklable."""
        return partial(encode_share, self.dataset, self.encoder, self.config)

    def _exchange(self, value: Any) -> list[Any]:
        """Collectives are timed apart: in them a rank waits for the others, not for its data."""
        started = time.perf_counter()
        values = self.exchange(value)
        self.exchange_seconds += time.perf_counter() - started
        return values

    def _assignments(self) -> Iterator[list[int]]:
        """This rank's rows of each step."""
        work = partial(measure_rows, self.dataset, self.encoder)
        unknown = decode_ahead(work, self._unmeasured(), self.config.data)
        for step in range(self.start_step, self.order.num_steps):
            for measured in self._exchange(next(unknown)):
                self.lengths.update(measured)
            rows = self.order.indices(step)
            shares = assign(
                [self.lengths[row] for row in rows],
                self.world_size // self.ranks_per_row,
                same_count=self.config.token_budget[0] is None,
            )
            yield [rows[i] for i in shares[self.rank // self.ranks_per_row]]

    def _unmeasured(self) -> Iterator[list[int]]:
        """This rank's share of the rows of each step whose length no earlier step has asked for."""
        requested: set[int] = set()
        for step in range(self.start_step, self.order.num_steps):
            new = [row for row in dict.fromkeys(self.order.indices(step)) if row not in requested]
            requested.update(new)
            yield new[self.rank :: self.world_size]

    def _step_batches(self, step: int, share: Share, waited: float) -> StepBatches:
        ranks = self._exchange((replace(share, batches=[]), len(share.batches), waited))
        for other, _, _ in ranks:  # every rank raises, so that none is left waiting
            if other.error is not None:
                raise DataError(other.error)
        shares = [other for other, _, _ in ranks]
        shares = of_groups(shares, [other.skipped for other in shares], self.ranks_per_row)
        # Where all rows of a step are left out it has no trained token, and a gradient of zero.
        num_tokens = max(1, sum(other.num_tokens for other in shares))
        return StepBatches(
            step=step,
            micro_batches=align_batches(
                share.batches,
                [count for _, count, _ in ranks],
                self.encoder,
                packing=self.config.train.packing,
                part=PartOf(self.rank % self.ranks_per_row, self.ranks_per_row),
            ),
            work=share.work,
            num_tokens=num_tokens,
            num_input_tokens=sum(other.num_input_tokens for other in shares),
            num_samples=sum(other.num_samples for other in shares),
            skipped=[text for other in shares for text in other.skipped],
            data_seconds=max(waited for _, _, waited in ranks),
        )


@dataclass(frozen=True)
class Share:
    """One rank's part of a step as its worker makes it: few, large tensors, because each one costs to hand over."""

    batches: list[Batch]
    work: Work = field(default_factory=Work)
    num_tokens: int = 0
    num_input_tokens: int = 0
    num_samples: int = 0
    skipped: tuple[str, ...] = ()
    error: str | None = None


def of_groups(values: Sequence[T], skipped: Sequence[Sequence[str]], ranks_per_row: int) -> list[T]:
    """Of the ranks' values, by rank, one for each group of ranks that read the same rows.

    Args:
        skipped: what each rank leaves out of its rows.

    Raises:
        DataError: the ranks of a group did not get the same from them.
    """
    for rank, value in enumerate(values):
        first = rank - rank % ranks_per_row
        if value != values[first]:
            of_first, of_rank = ("; ".join(skipped[number]) or "nothing" for number in (first, rank))
            raise DataError(
                f"ranks {first} and {rank} compute the same rows (train.sequence_parallel_size is {ranks_per_row}) and did not "
                f"read the same: rank {first} leaves out {of_first}, rank {rank} {of_rank}; look whether the files are being "
                "changed, or cannot always be read"
            )
    return list(values[::ranks_per_row])


def measure_rows(dataset: SampleDataset, encoder: Encoder, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Each row and its token count. A bad row counts 0 here and is reported when it is encoded."""
    lengths = read_rows(dataset, encoder.measure, rows)
    return [(row, 0 if isinstance(length, DataError) else length) for row, length in zip(rows, lengths, strict=True)]


def encode_share(dataset: SampleDataset, encoder: Encoder, config: RunConfig, rows: Sequence[int]) -> Share:
    """The rows as micro-batches. An error is a value here, so that its text reaches the ranks whole."""
    found = read_rows(dataset, encoder.encode, rows)
    samples = [item for item in found if isinstance(item, EncodedSample)]
    bad = [item for item in found if isinstance(item, DataError)]
    refused = first_fatal(bad, config)
    if refused is not None:
        return Share([], error=refused)
    try:
        groups = cut_samples(samples, config)
    except DataError as error:
        return Share([], error=str(error))
    work = work_of(groups, packing=config.train.packing)
    return Share(
        work=work,
        batches=[make_batch(group, packing=config.train.packing, pad_id=encoder.pad_id) for group in groups],
        num_tokens=work.trained_tokens,
        num_input_tokens=work.tokens,
        num_samples=len(samples),
        skipped=tuple(map(str, bad)),
    )


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


def decode_ahead(work: Callable[[Any], T], tasks: Iterable[Any], data: DataConfig) -> Iterator[T]:
    """Apply `work` to every task in worker processes, in order, about `data.prefetch` tasks ahead."""
    ahead = math.ceil(data.prefetch / data.workers) if data.workers else None
    return in_workers(work, tasks, workers=data.workers, ahead=ahead)


def in_workers(
    work: Callable[[Any], T], tasks: Iterable[Any], *, workers: int, ahead: int | None = None
) -> Iterator[T]:
    """`work(task)` of every task, in order, made by `workers` processes (0: by this one), each `ahead` tasks ahead.

    Raises:
        DsReasonError: what `work` raised, or that a worker died.
    """
    started = RawArray("b", workers) if workers else ()
    loader = DataLoader(
        WorkDataset(work),
        batch_size=None,
        sampler=tasks,
        num_workers=workers,
        collate_fn=lambda item: item,
        generator=torch.Generator(),  # otherwise it draws from the trainer's
        prefetch_factor=ahead,
        worker_init_fn=partial(start_worker, started) if workers else None,
    )
    try:
        items = iter(loader)
        if workers:
            wait_for_start(items._workers, started)  # type: ignore[attr-defined]  # one with workers has them
        for item in items:
            if isinstance(item, DsReasonError):
                raise item
            yield item
    except RuntimeError as error:
        if (readable_error := dead_worker_as_error(error)) is error:
            raise
        raise readable_error from error


def wait_for_start(processes: Sequence[BaseProcess], started: Sequence[int]) -> None:
    """Wait until every worker has started; end those that do not.

    Before Python 3.11.8 a forked process may wait for ever for a lock of the interpreter that another thread held at the
    fork (github.com/python/cpython/issues/112275).

    Raises:
        DsReasonError: a worker has not started within `START_SECONDS`.
    """
    deadline = time.monotonic() + START_SECONDS
    while not all(started):
        time.sleep(0.002)
        if time.monotonic() > deadline:
            for process, has_started in zip(processes, started, strict=True):
                if not has_started:
                    process.kill()
            raise DsReasonError(
                f"a data worker has not started within {START_SECONDS:g} s and was killed; Python before 3.11.8 causes this at "
                f"times (this one is {python_version()}): start again with --resume auto, or take a newer Python"
            )


def start_worker(started: Sequence[int], number: int) -> None:
    """Prepare a worker before its first task, and note in `started` that it runs.

    Python only prints why a queue could not take an item, and the trainer would wait for it for ever. And torchrun sends what
    asks a rank to stop to all of its process group: a worker that died of it would take the rank along, before it has saved.
    """
    started[number] = 1  # type: ignore[index]  # shared with the trainer
    os.setpgid(0, 0)
    Queue._on_queue_feeder_error = staticmethod(end_worker)  # type: ignore[attr-defined]


def end_worker(error: Exception, item: object) -> None:
    if not isinstance(error, ConnectionError):  # else the trainer has left the loop, and nobody waits
        say("".join(format_exception_only(error)).rstrip(), err=True)
        os._exit(1)


class WorkDataset(Dataset[Any]):
    """A function as a dataset for torch's loader. User-fixable errors are returned: torch would add a worker's traceback."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> Any:
        try:
            return self.work(task)
        except DsReasonError as error:
            return error
