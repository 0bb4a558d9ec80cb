"""A loader for preference pairs: a step's row indices → its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.loader import RankShare, StepBatches, StepLoader, find_fatal_error, read_rows
from dsreason.data.micro_batches import compute_work, make_batch
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Batch
from dsreason.errors import DataError
from dsreason.job.ranks import World, gather_objects
from dsreason.train.dpo.pairs import Pair, PairEncoder, build_pair_encoder, cut_pairs


@dataclass(frozen=True)
class PairFacts:
    """Metadata of a pair, without its tensors."""

    row: int
    """Index of the row in its data set, starting at 0."""
    id: str
    where: str
    """File and row number, for error messages."""
    fingerprint: str
    lengths: tuple[int, int]
    """Number of tokens with a loss in the chosen answer, and in the rejected answer."""
    ref_logprobs: tuple[float, float] | None
    """Log-probabilities of both answers under the reference, as read from the row; None if the row has none."""


@dataclass(frozen=True)
class PairMicroBatch:
    """Pairs that share one forward pass.

    The tokens with a loss in `batch` are ordered by pair, with the chosen answer before the rejected one. `pairs` is empty
    for a dummy batch, which exists only so that all ranks run the same number of forward passes.
    """

    batch: Batch
    pairs: tuple[PairFacts, ...]

    @property
    def lengths(self) -> Tensor:
        """Number of tokens with a loss in each pair's chosen and rejected answer, `[P, 2]` int64."""
        return torch.tensor([pair.lengths for pair in self.pairs], dtype=torch.int64).view(-1, 2)


@dataclass(frozen=True)
class StepPairs(StepBatches):
    """This rank's part of a global batch of pairs; `num_samples` counts pairs."""

    pairs: list[tuple[PairFacts, ...]]
    """Each micro-batch's pairs."""

    @property
    def parts(self) -> list[PairMicroBatch]:
        return [PairMicroBatch(batch, pairs) for batch, pairs in zip(self.micro_batches, self.pairs, strict=True)]


@dataclass(frozen=True)
class PairShare(RankShare):
    pairs: list[tuple[PairFacts, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Chunks:
    """A step order that uses each row once, in the order of `rows`, with `size` rows per step."""

    rows: Sequence[int]
    size: int

    @property
    def num_steps(self) -> int:
        return -(-len(self.rows) // self.size)

    def indices(self, step: int) -> list[int]:
        return list(self.rows[step * self.size : (step + 1) * self.size])


@dataclass
class PairLoader(StepLoader):
    """A `StepLoader` that keeps the two answers of a pair in the same micro-batch."""

    encoder: PairEncoder
    config: DPOConfig

    def __iter__(self) -> Iterator[StepPairs]:
        return cast("Iterator[StepPairs]", super().__iter__())

    def _encode_share(self) -> Callable[[Sequence[int]], RankShare]:
        return partial(encode_pairs, self.dataset, self.encoder, self.config)

    def _step_batches(self, step: int, share: RankShare, waited: float) -> StepPairs:
        assert isinstance(share, PairShare)
        step_batches = super()._step_batches(step, share, waited)
        num_dummies = len(step_batches.micro_batches) - len(share.pairs)
        return StepPairs(**vars(step_batches), pairs=[*share.pairs, *[()] * num_dummies])


def build_pair_loader(
    dataset: SampleDataset,
    encoder: Encoder,
    steps: StepOrder | Chunks,
    config: DPOConfig,
    world: World,
    *,
    start_step: int = 0,
) -> PairLoader:
    return PairLoader(
        dataset,
        build_pair_encoder(encoder),
        steps,
        config,
        rank=world.rank,
        world_size=world.size,
        ranks_per_row=world.ranks_per_row,
        exchange=gather_objects,
        start_step=start_step,
    )


def iter_pair_batches(
    dataset: SampleDataset, encoder: Encoder, rows: Sequence[int], config: DPOConfig, world: World, *, batch_size: int
) -> Iterator[StepPairs]:
    """Yield the pairs from `rows` in the given order, `batch_size` pairs at a time. Collective."""
    return iter(build_pair_loader(dataset, encoder, Chunks(rows, batch_size), config, world))


def encode_pairs(dataset: SampleDataset, encoder: PairEncoder, config: DPOConfig, rows: Sequence[int]) -> PairShare:
    """Encode the rows into micro-batches of pairs.

    A fatal error is returned in the result rather than raised, so that all ranks can report the full message.
    """
    encoded = read_rows(dataset, encoder.encode_pair, rows)
    pairs = {row: item for row, item in zip(rows, encoded, strict=True) if isinstance(item, Pair)}
    bad = [item for item in encoded if isinstance(item, DataError)]
    fatal = find_fatal_error(bad, config)
    if fatal is not None:
        return PairShare([], error=fatal)
    try:
        groups = cut_pairs(list(pairs.values()), config)
    except DataError as error:
        return PairShare([], error=str(error))
    row_of = {id(pair): row for row, pair in pairs.items()}
    samples = [
        [sample for pair in group for sample in pair.samples(share_prompt=config.shares_prompts)] for group in groups
    ]
    work = compute_work(samples, packing=config.train.packing)
    return PairShare(
        work=work,
        batches=[make_batch(group, packing=config.train.packing, pad_id=encoder.pad_id) for group in samples],
        num_tokens=work.trained_tokens,
        num_input_tokens=work.tokens,
        num_samples=len(pairs),
        skipped=tuple(map(str, bad)),
        pairs=[tuple(build_pair_facts(dataset, row_of[id(pair)], pair) for pair in group) for group in groups],
    )


def build_pair_facts(dataset: SampleDataset, row: int, pair: Pair) -> PairFacts:
    return PairFacts(row, pair.id, dataset.describe_location(row), pair.fingerprint, pair.lengths, pair.ref_logprobs)
