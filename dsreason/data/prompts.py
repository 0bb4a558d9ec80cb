"""The prompts of each rollout, decoded ahead of sampling by worker processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from dsreason.config.schema import RunConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import decode_ahead, first_fatal, read_rows
from dsreason.data.micro_batches import Exchange
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError

Check = Callable[[Sample], None]
"""Raises DataError for a sample that cannot be used; picklable."""


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one batch of the order.

    Example, rank 1 of 2 in batches of 6, where the second of its rows is left out:
    `Prompts(batch=4, prompts=[…, …], numbers=[1, 5], skipped=["rows.jsonl, row 7: …"])`.
    """

    batch: int
    """Of `StepOrder.indices`."""
    prompts: list[EncodedPrompt]
    numbers: list[int]
    """The prompts' places in the batch of all ranks, whatever was left out."""
    skipped: list[str]
    """Rows left out on any rank, with the reason."""


@dataclass
class PromptLoader:
    """Iterates without end over the batches from `start` on: this rank's prompts of each.

    Which prompts they are depends on nothing but seed, batch and number of ranks. A row that cannot be used, or that
    `check` refuses, is a DataError on every rank, or left out where the configuration says so.
    """

    dataset: SampleDataset
    encoder: Encoder
    order: StepOrder
    config: RunConfig
    exchange: Exchange
    rank: int = 0
    world_size: int = 1
    start: int = 0
    check: Check | None = None

    def __iter__(self) -> Iterator[Prompts]:
        read = partial(read_rows, self.dataset, partial(ask, self.encoder, self.check))
        shares = (self.order.indices(batch)[self.rank :: self.world_size] for batch in itertools.count(self.start))
        found = decode_ahead(read, shares, self.config.data)
        for batch in itertools.count(self.start):
            yield self._prompts(batch, next(found))

    def _prompts(self, batch: int, items: list[EncodedPrompt | DataError]) -> Prompts:
        bad = [item for item in items if isinstance(item, DataError)]
        ranks = self.exchange((first_fatal(bad, self.config), [str(error) for error in bad]))
        for error, _ in ranks:  # every rank raises, so that none is left waiting
            if error is not None:
                raise DataError(error)
        places = range(self.rank, self.order.batch_size, self.world_size)
        usable = [(place, item) for place, item in zip(places, items, strict=True) if isinstance(item, EncodedPrompt)]
        return Prompts(
            batch=batch,
            prompts=[prompt for _, prompt in usable],
            numbers=[place for place, _ in usable],
            skipped=[text for _, texts in ranks for text in texts],
        )


def ask(encoder: Encoder, check: Check | None, sample: Sample) -> EncodedPrompt:
    """The prompt of a sample, which `check` may refuse."""
    if check is not None:
        check(sample)
    return encoder.encode_prompt(sample)


class PromptEncoder(Encoder):
    """For rows that are only asked: their length is the prompt's, however long the reference answer is."""

    def measure(self, sample: Sample) -> int:
        """`len(encode_prompt(sample).encoded)` from media headers, without decoding; may exceed `max_length`."""
        return self._count(*self._prompt(sample))
