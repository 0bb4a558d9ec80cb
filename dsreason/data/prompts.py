"""The prompts of each rollout, decoded ahead of sampling by worker processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from dsreason.config.schema import RunConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import decode_ahead, first_fatal, of_groups, read_rows
from dsreason.data.micro_batches import Exchange
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.job.part_of import PartOf

Check = Callable[[Sample], None]
"""Raises DataError for a sample that cannot be used; picklable."""


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one batch of the order; those of the ranks that compute rows together are the same.

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

    def part(self, part: PartOf) -> Prompts:
        """Those that one of the ranks asks that have all of them: the second of two has every second one."""
        own_part = slice(part.number, None, part.total)
        return replace(self, prompts=self.prompts[own_part], numbers=self.numbers[own_part])


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
    ranks_per_row: int = 1
    """So many ranks, one behind the other, have the same prompts."""
    start: int = 0
    check: Check | None = None

    def __iter__(self) -> Iterator[Prompts]:
        read = partial(read_rows, self.dataset, partial(ask, self.encoder, self.check))
        shares = (self.order.indices(batch)[self._places] for batch in itertools.count(self.start))
        batches = decode_ahead(read, shares, self.config.data)
        for batch in itertools.count(self.start):
            yield self._prompts(batch, next(batches))

    @property
    def _places(self) -> slice:
        """Of this rank's prompts in a batch."""
        return slice(self.rank // self.ranks_per_row, None, self.world_size // self.ranks_per_row)

    def _prompts(self, batch: int, items: list[EncodedPrompt | DataError]) -> Prompts:
        bad = [item for item in items if isinstance(item, DataError)]
        ranks = self.exchange((first_fatal(bad, self.config), [str(error) for error in bad]))
        for error, _ in ranks:  # every rank raises, so that none is left waiting
            if error is not None:
                raise DataError(error)
        skipped = [texts for _, texts in ranks]
        groups = of_groups(skipped, skipped, self.ranks_per_row)
        places = range(self.order.batch_size)[self._places]
        usable = [(place, item) for place, item in zip(places, items, strict=True) if isinstance(item, EncodedPrompt)]
        return Prompts(
            batch=batch,
            prompts=[prompt for _, prompt in usable],
            numbers=[place for place, _ in usable],
            skipped=[text for texts in groups for text in texts],
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
