"""Loader that provides the prompts for each rollout; worker processes encode them ahead of sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from dsreason.config.schema import RunConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import decode_ahead, exchange_or_raise, find_fatal_error, read_rows, take_group_values
from dsreason.data.micro_batches import Exchange
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError, DsReasonError
from dsreason.job.part_of import PartOf

Check = Callable[[Sample], None]
"""Picklable function that raises DataError if a sample cannot be used."""


@dataclass(frozen=True)
class Prompts:
    """This rank's share of a batch of prompts. Ranks that compute rows together have the same prompts.

    Example: rank 1 of 2, with a batch of 6 prompts, after the second of the rank's three rows was skipped:
    `Prompts(batch=4, prompts=[…, …], numbers=[1, 5], skipped=["rows.jsonl, row 7: …"])`.
    """

    batch: int
    """Index of the batch, which is passed to `StepOrder.indices` as the step."""
    prompts: list[EncodedPrompt]
    numbers: list[int]
    """Index of each prompt in the batch over all ranks; skipped rows count."""
    skipped: list[str]
    """Messages about the rows that any rank skipped; each names the row and the reason."""

    def part(self, part: PartOf) -> Prompts:
        """Return the prompts for one of several ranks that share prompts; with two ranks, every second prompt."""
        part_slice = slice(part.number, None, part.total)
        return replace(self, prompts=self.prompts[part_slice], numbers=self.numbers[part_slice])


@dataclass
class PromptLoader:
    """Endless iterable over this rank's prompts in each batch, starting with batch `start`.

    The prompts depend only on the seed, the batch and the number of ranks. If a row cannot be used or `check` rejects its sample,
    the configuration determines whether the row is skipped or all ranks raise DataError.
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
        shares = (self.order.indices(batch)[self._positions] for batch in itertools.count(self.start))
        batches = decode_ahead(read, shares, self.config.data)
        for batch in itertools.count(self.start):
            try:
                items = next(batches)
            except DsReasonError as error:
                exchange_or_raise(self.exchange, error)
                raise
            yield self._build_prompts(batch, items)

    @property
    def _positions(self) -> slice:
        """Positions of this rank's prompts in a batch."""
        return slice(self.rank // self.ranks_per_row, None, self.world_size // self.ranks_per_row)

    def _build_prompts(self, batch: int, items: list[EncodedPrompt | DataError]) -> Prompts:
        bad = [item for item in items if isinstance(item, DataError)]
        fatal, texts = find_fatal_error(bad, self.config), [str(error) for error in bad]
        ranks = exchange_or_raise(self.exchange, (fatal, texts))
        for error, _ in ranks:  # every rank raises the error, so that no rank keeps waiting for another
            if error is not None:
                raise DataError(error)
        skipped = [texts for _, texts in ranks]
        groups = take_group_values(skipped, skipped, self.ranks_per_row)
        positions = range(self.order.batch_size)[self._positions]
        usable = [
            (index, item) for index, item in zip(positions, items, strict=True) if isinstance(item, EncodedPrompt)
        ]
        return Prompts(
            batch=batch,
            prompts=[prompt for _, prompt in usable],
            numbers=[index for index, _ in usable],
            skipped=[text for texts in groups for text in texts],
        )


def encode_checked_prompt(encoder: Encoder, check: Check | None, sample: Sample) -> EncodedPrompt:
    """Encode the prompt of a sample; raise DataError if `check` rejects the sample."""
    if check is not None:
        check(sample)
    return encoder.encode_prompt(sample)


class PromptEncoder(Encoder):
    """Encoder for rows that are used only as prompts. A row's measured length excludes the reference answer."""

    def measure(self, sample: Sample) -> int:
        """Compute `len(encode_prompt(sample).encoded)` from media headers, without decoding; it may exceed `max_length`."""
        return self._count(*self._render_prompt(sample))
