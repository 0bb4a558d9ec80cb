"""The prompts of each rollout, decoded ahead of sampling by worker processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from dsreason.config.schema import RunConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import decode_ahead, find_fatal_error, read_rows, take_group_values
from dsreason.data.micro_batches import Exchange
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.job.part_of import PartOf

Check = Callable[[Sample], None]
"""A picklable function that raises DataError for a sample that cannot be used."""


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one batch; ranks that compute rows together have the same prompts.

    Example, rank 1 of 2 in batches of 6, with the second of its rows left out:
    `Prompts(batch=4, prompts=[…, …], numbers=[1, 5], skipped=["rows.jsonl, row 7: …"])`.
    """

    batch: int
    """Batch number, as in `StepOrder.indices`."""
    prompts: list[EncodedPrompt]
    numbers: list[int]
    """Indices of the prompts in the batch of all ranks, regardless of rows left out."""
    skipped: list[str]
    """Rows left out on any rank, with the reason."""

    def part(self, part: PartOf) -> Prompts:
        """Return the prompts that one of the ranks that share them samples: the second of two ranks gets every second one."""
        part_slice = slice(part.number, None, part.total)
        return replace(self, prompts=self.prompts[part_slice], numbers=self.numbers[part_slice])


@dataclass
class PromptLoader:
    """An endless iterator over this rank's prompts of each batch, beginning at batch `start`.

    The prompts depend only on the seed, the batch and the number of ranks. A row that cannot be used, or that `check`
    refuses, raises a DataError on every rank or is left out, as configured.
    """

    dataset: SampleDataset
    encoder: Encoder
    order: StepOrder
    config: RunConfig
    exchange: Exchange
    rank: int = 0
    world_size: int = 1
    ranks_per_row: int = 1
    """Number of consecutive ranks that have the same prompts."""
    start: int = 0
    check: Check | None = None

    def __iter__(self) -> Iterator[Prompts]:
        read = partial(read_rows, self.dataset, partial(encode_checked_prompt, self.encoder, self.check))
        shares = (self.order.indices(batch)[self._places] for batch in itertools.count(self.start))
        batches = decode_ahead(read, shares, self.config.data)
        for batch in itertools.count(self.start):
            yield self._build_prompts(batch, next(batches))

    @property
    def _places(self) -> slice:
        """Positions of this rank's prompts in a batch."""
        return slice(self.rank // self.ranks_per_row, None, self.world_size // self.ranks_per_row)

    def _build_prompts(self, batch: int, items: list[EncodedPrompt | DataError]) -> Prompts:
        bad = [item for item in items if isinstance(item, DataError)]
        ranks = self.exchange((find_fatal_error(bad, self.config), [str(error) for error in bad]))
        for error, _ in ranks:  # every rank raises, so that no rank keeps waiting
            if error is not None:
                raise DataError(error)
        skipped = [texts for _, texts in ranks]
        groups = take_group_values(skipped, skipped, self.ranks_per_row)
        places = range(self.order.batch_size)[self._places]
        usable = [(place, item) for place, item in zip(places, items, strict=True) if isinstance(item, EncodedPrompt)]
        return Prompts(
            batch=batch,
            prompts=[prompt for _, prompt in usable],
            numbers=[place for place, _ in usable],
            skipped=[text for texts in groups for text in texts],
        )


def encode_checked_prompt(encoder: Encoder, check: Check | None, sample: Sample) -> EncodedPrompt:
    """Encode the prompt of a sample, which `check` may refuse."""
    if check is not None:
        check(sample)
    return encoder.encode_prompt(sample)


class PromptEncoder(Encoder):
    """An encoder for rows that are only prompts: their length does not include the reference answer."""

    def measure(self, sample: Sample) -> int:
        """Compute `len(encode_prompt(sample).encoded)` from media headers, without decoding; may exceed `max_length`."""
        return self._count(*self._render_prompt(sample))
