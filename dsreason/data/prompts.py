"""The prompts of each rollout, decoded ahead of sampling by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import Dataset

from dsreason.config.schema import DataConfig
from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.loader import BadRow, decode_ahead, next_item
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.errors import DataError


class PromptLoader:
    """Iterates over the rollouts from `start` to the last one: this rank's prompts of each.

    Which prompts they are depends on nothing but seed, rollout and number of ranks. Raises DataError for a row that
    cannot be used.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        encoder: Encoder,
        order: StepOrder,
        data: DataConfig,
        agree: Callable[[DataError | None], None],
        *,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> None:
        self.dataset, self.encoder, self.order, self.data, self.agree = dataset, encoder, order, data, agree
        self.rank, self.world_size, self.start = rank, world_size, start

    def __iter__(self) -> Iterator[list[EncodedPrompt]]:
        shares = [self.order.indices(i)[self.rank :: self.world_size] for i in range(self.start, self.order.num_steps)]
        found = iter(decode_ahead(PromptEncoding(self.dataset, self.encoder), shares, self.data))
        for _ in shares:
            items = next_item(found)
            bad = [item.reason for item in items if isinstance(item, BadRow)]
            self.agree(DataError(bad[0]) if bad else None)
            yield [item for item in items if isinstance(item, EncodedPrompt)]


class PromptEncoding(Dataset[list[EncodedPrompt | BadRow]]):
    """Row numbers → encoded prompts."""

    def __init__(self, dataset: SampleDataset, encoder: Encoder) -> None:
        self.dataset, self.encoder = dataset, encoder

    def __getitem__(self, rows: list[int]) -> list[EncodedPrompt | BadRow]:
        return [self._encode(row) for row in rows]

    def _encode(self, row: int) -> EncodedPrompt | BadRow:
        try:
            return self.encoder.encode_prompt(self.dataset[row])
        except DataError as error:
            return BadRow(f"{self.dataset.location(row)}: {error}", too_long=False)
