"""Loader that provides each step's micro-batches while worker processes decode the rows for later steps.

For every step, the ranks measure the rows' token counts (from media headers, once per row), divide the rows among themselves,
and decode their shares. Micro-batches are then added until all ranks have the same number.
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
from torch.utils.data._utils import signal_handling

from dsreason.config.schema import RunConfig
from dsreason.config.schema_data import DataConfig
from dsreason.data.chat import Encoder, SampleTooLong
from dsreason.data.micro_batches import Exchange, align_batches, compute_work, cut_samples, make_batch
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Batch, EncodedSample, Sample
from dsreason.errors import DataError, DsReasonError, Stopped
from dsreason.job.failures import convert_dead_worker_error
from dsreason.job.part_of import PartOf
from dsreason.monitor.flops import Work
from dsreason.screen import print_message
from dsreason.stopping import POLL_S, check_stop

T = TypeVar("T")

TIMED_OUT = "DataLoader timed out"
"""Start of torch's error message when a worker does not deliver an item in time. The item can then be requested again."""
START_SECONDS = 120.0
"""Seconds within which a data worker must start, which normally takes milliseconds."""


@dataclass(frozen=True)
class StepBatches:
    """This rank's micro-batches for one step, and the step's statistics over all ranks."""

    step: int
    micro_batches: list[Batch]
    """This rank's micro-batches; every rank has the same number."""
    work: Work
    """Work of this rank's micro-batches, for the FLOPs estimate."""
    num_tokens: int
    """Number of trained tokens over all ranks and micro-batches; 0 if all of the step's rows were skipped."""
    num_input_tokens: int
    """Number of tokens over all ranks, without padding."""
    num_samples: int
    """Number of samples over all ranks."""
    skipped: list[str]
    """Messages about the rows that any rank skipped; each names the row and the reason."""
    data_seconds: float
    """Seconds that the slowest rank waited for its data workers."""


def read_row(dataset: SampleDataset, row: int, use: Callable[[Sample], T]) -> T | DataError:
    """Return `use(sample)` for the sample in a row, or an error that names the row.

    The error is returned instead of raised, because torch would add the worker's traceback to its message.
    """
    try:
        sample = dataset[row]
    except DataError as error:  # the message already names the row
        return error
    try:
        return use(sample)
    except DataError as error:
        return type(error)(f"{dataset.describe_location(row)}: {error}")


def read_rows(dataset: SampleDataset, use: Callable[[Sample], T], rows: Sequence[int]) -> list[T | DataError]:
    return [read_row(dataset, row, use) for row in rows]


def find_fatal_error(bad: Iterable[DataError], config: RunConfig) -> str | None:
    """Return the first message of an error that must not be skipped (`data.on_bad_row`, `model.on_too_long`), or None."""
    policies = {True: config.model.on_too_long, False: config.data.on_bad_row}
    return next((str(error) for error in bad if policies[isinstance(error, SampleTooLong)] == "error"), None)


class Steps(Protocol):
    """Interface for a row order, which provides the row indices for each step."""

    @property
    def num_steps(self) -> int: ...

    def indices(self, step: int) -> list[int]:
        """Return the row indices in the global batch for `step`, which counts from 0."""


@dataclass
class StepLoader:
    """Iterable over each step's batches, from `start_step` on. Which rows a step has depends only on the seed and the step."""

    dataset: SampleDataset
    encoder: Encoder
    order: Steps
    config: RunConfig
    exchange: Exchange
    rank: int = 0
    world_size: int = 1
    ranks_per_row: int = 1
    """Number of consecutive ranks that share their rows; each of them computes a part of every row."""
    start_step: int = 0
    lengths: dict[int, int] = field(default_factory=dict, init=False)
    """Row index → token count for all rows measured so far; identical on all ranks."""
    exchange_seconds: float = field(default=0.0, init=False)
    """Seconds spent in collective operations during the current step."""
    has_failed: bool = field(default=False, init=False)
    """Whether an exchange has failed, in which case every rank already raises the error."""

    def __iter__(self) -> Iterator[StepBatches]:
        shares = decode_ahead(self._encode_share(), self._assign_rows(), self.config.data)
        for step in range(self.start_step, self.order.num_steps):
            started, self.exchange_seconds = time.perf_counter(), 0.0
            try:
                share = next(shares)
            except DsReasonError as error:
                if not self.has_failed:  # the other ranks do not know the error yet
                    self._exchange(error)
                raise
            waited = time.perf_counter() - started - self.exchange_seconds
            yield self._step_batches(step, share, waited)

    def _encode_share(self) -> Callable[[Sequence[int]], RankShare]:
        """Return the picklable function that workers call to encode this rank's rows for a step."""
        return partial(encode_share, self.dataset, self.encoder, self.config)

    def _exchange(self, value: Any) -> list[Any]:
        """Exchange a value among the ranks. The time is counted separately, because it is not spent waiting for data."""
        started, self.has_failed = time.perf_counter(), True
        values = exchange_or_raise(self.exchange, value)
        self.exchange_seconds, self.has_failed = self.exchange_seconds + time.perf_counter() - started, False
        return values

    def _assign_rows(self) -> Iterator[list[int]]:
        """Yield this rank's rows for each step."""
        work = partial(measure_rows, self.dataset, self.encoder)
        unknown = decode_ahead(work, self._find_unmeasured_rows(), self.config.data)
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

    def _find_unmeasured_rows(self) -> Iterator[list[int]]:
        """Yield, for each step, this rank's share of the rows that no earlier step has measured."""
        requested: set[int] = set()
        for step in range(self.start_step, self.order.num_steps):
            new = [row for row in dict.fromkeys(self.order.indices(step)) if row not in requested]
            requested.update(new)
            yield new[self.rank :: self.world_size]

    def _step_batches(self, step: int, share: RankShare, waited: float) -> StepBatches:
        ranks = self._exchange((replace(share, batches=[]), len(share.batches), waited))
        for other, _, _ in ranks:  # every rank raises the error, so that no rank keeps waiting for another
            if other.error is not None:
                raise DataError(other.error)
        shares = [other for other, _, _ in ranks]
        shares = take_group_values(shares, [other.skipped for other in shares], self.ranks_per_row)
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
            num_tokens=sum(other.num_tokens for other in shares),
            num_input_tokens=sum(other.num_input_tokens for other in shares),
            num_samples=sum(other.num_samples for other in shares),
            skipped=[text for other in shares for text in other.skipped],
            data_seconds=max(waited for _, _, waited in ranks),
        )


@dataclass(frozen=True)
class RankShare:
    """One rank's share of a step, built by a worker.

    It consists of a few large tensors, because sending a tensor from a worker has a fixed cost, whatever its size.
    """

    batches: list[Batch]
    work: Work = field(default_factory=Work)
    num_tokens: int = 0
    num_input_tokens: int = 0
    num_samples: int = 0
    skipped: tuple[str, ...] = ()
    error: str | None = None


def take_group_values(values: Sequence[T], skipped: Sequence[Sequence[str]], ranks_per_row: int) -> list[T]:
    """Return one value per group of ranks that share their rows.

    Args:
        values: one value per rank.
        skipped: for each rank, messages about the rows that it skipped.

    Raises:
        DataError: two ranks of a group have different values.
    """
    for rank, value in enumerate(values):
        first = rank - rank % ranks_per_row
        if value != values[first]:
            first_skipped, rank_skipped = ("; ".join(skipped[number]) or "nothing" for number in (first, rank))
            raise DataError(
                f"ranks {first} and {rank} compute the same packed rows (train.sequence_parallel_size is {ranks_per_row}) but "
                f"read different data: rank {first} skips {first_skipped}, but rank {rank} skips {rank_skipped}; make sure "
                "that the files do not change and can always be read"
            )
    return list(values[::ranks_per_row])


def measure_rows(dataset: SampleDataset, encoder: Encoder, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return (row, token count) pairs. The count for an unusable row is 0; its error is reported when the row is encoded."""
    lengths = read_rows(dataset, encoder.measure, rows)
    return [(row, 0 if isinstance(length, DataError) else length) for row, length in zip(rows, lengths, strict=True)]


def encode_share(dataset: SampleDataset, encoder: Encoder, config: RunConfig, rows: Sequence[int]) -> RankShare:
    """Encode the rows as micro-batches. Errors are returned in the share so that all ranks receive the full message."""
    items = read_rows(dataset, encoder.encode, rows)
    samples = [item for item in items if isinstance(item, EncodedSample)]
    bad = [item for item in items if isinstance(item, DataError)]
    refused = find_fatal_error(bad, config)
    if refused is not None:
        return RankShare([], error=refused)
    try:
        groups = cut_samples(samples, config)
    except DataError as error:
        return RankShare([], error=str(error))
    work = compute_work(groups, packing=config.train.packing)
    return RankShare(
        work=work,
        batches=[make_batch(group, packing=config.train.packing, pad_id=encoder.pad_id) for group in groups],
        num_tokens=work.trained_tokens,
        num_input_tokens=work.tokens,
        num_samples=len(samples),
        skipped=tuple(map(str, bad)),
    )


def exchange_or_raise(exchange: Exchange, value: T | DsReasonError) -> list[T]:
    """Return the values from all ranks; if any rank passes an error, raise the first such error on every rank. Collective."""
    values = exchange(value)
    for rank_value in values:
        if isinstance(rank_value, DsReasonError):
            raise rank_value
    return values


def assign(lengths: Sequence[int], num_ranks: int, *, same_count: bool) -> list[list[int]]:
    """Assign samples to ranks, longest first, each to the rank with the smallest total length; return the indices per rank.

    With `same_count`, the number of samples per rank differs by at most one. On a tie, the lowest rank gets the sample.

    Example: lengths [8, 7, 6, 5, 4] over 2 ranks → totals 17 and 13 without `same_count`.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    largest = math.ceil(len(lengths) / num_ranks)
    num_largest = len(lengths) - (largest - 1) * num_ranks  # number of ranks that may have `largest` samples
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
    """Yield `work(task)` for every task in order, computed by worker processes about `data.prefetch` tasks ahead."""
    ahead = math.ceil(data.prefetch / data.workers) if data.workers else None
    return run_in_workers(work, tasks, workers=data.workers, ahead=ahead)


def run_in_workers(
    work: Callable[[Any], T], tasks: Iterable[Any], *, workers: int, ahead: int | None = None
) -> Iterator[T]:
    """Yield `work(task)` for every task in order, computed by `workers` processes that each work `ahead` tasks ahead.

    With 0 workers, this process does the work.

    Raises:
        DsReasonError: `work` raised it, or a worker died.
        Stopped: this process was asked to stop while it waited for a worker.
    """
    started = RawArray("b", workers) if workers else ()
    loader = DataLoader(
        WorkDataset(work),
        batch_size=None,
        sampler=tasks,
        num_workers=workers,
        collate_fn=lambda item: item,
        generator=torch.Generator(),  # the default would draw from the trainer's generator
        prefetch_factor=ahead,
        timeout=POLL_S if workers else 0,
        worker_init_fn=partial(start_worker, started) if workers else None,
    )
    try:
        items = iter(loader)
        if workers:
            wait_for_start(items._workers, started)  # type: ignore[attr-defined]  # exists because workers > 0
        for item in wait_for_items(items):
            if isinstance(item, DsReasonError):
                raise item
            yield item
    except RuntimeError as error:
        if (readable_error := convert_dead_worker_error(error)) is error:
            raise
        raise readable_error from error


def wait_for_items(items: Iterator[T]) -> Iterator[T]:
    """Yield a loader's items, waiting for each beyond the loader's timeout; raise Stopped if this process is asked to stop."""
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except RuntimeError as error:
            if not str(error).startswith(TIMED_OUT):
                raise
            try:
                check_stop()
            except Stopped:
                kill_workers(items)
                raise
            continue
        yield item


def kill_workers(loader: Any) -> None:
    """Kill a loader's workers, which may hang. torch would wait 5 s for each worker and report its death as an error."""
    signal_handling._remove_worker_pids(id(loader))
    loader._worker_pids_set = False
    for process in loader._workers:
        process.kill()


def wait_for_start(processes: Sequence[BaseProcess], started: Sequence[int]) -> None:
    """Wait until every worker has started; kill the workers that have not started in time.

    Before Python 3.11.8, a forked process may wait forever for an interpreter lock that another thread held during the fork
    (github.com/python/cpython/issues/112275).

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
                f"a data worker did not start within {START_SECONDS:g} s and was killed; Python versions before 3.11.8 "
                f"sometimes cause this (yours is {python_version()}): restart with --resume auto, or use a newer Python"
            )


def start_worker(started: Sequence[int], number: int) -> None:
    """Prepare a worker before its first task, and mark it as started in `started`.

    Two defaults are changed. First, if a queue cannot send an item, Python only prints the error, and the trainer would wait
    forever; here, the worker exits instead. Second, torchrun sends stop signals to a rank's process group, and the death of a
    worker would end the rank before it saves a checkpoint; the worker therefore gets its own process group.
    """
    started[number] = 1  # type: ignore[index]  # shared with the trainer
    os.setpgid(0, 0)
    Queue._on_queue_feeder_error = staticmethod(end_worker)  # type: ignore[attr-defined]


def end_worker(error: Exception, item: object) -> None:
    if not isinstance(error, ConnectionError):  # a closed connection means that the trainer has left the loop
        print_message("".join(format_exception_only(error)).rstrip(), err=True)
        os._exit(1)


class WorkDataset(Dataset[Any]):
    """Dataset for torch's loader that calls a function for each task.

    A `DsReasonError` is returned instead of raised, because torch would add a traceback to its message.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> Any:
        try:
            return self.work(task)
        except DsReasonError as error:
            return error
