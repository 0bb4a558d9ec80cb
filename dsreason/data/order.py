"""Row order as a pure function of the seed and the step, so that a resumed run needs only the step number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsreason.errors import DataError


@dataclass(frozen=True)
class WeightedRows:
    """Row indices, and a weight that determines how many times each row appears in an epoch.

    With weight 2, each row appears twice per epoch. With weight 0.5, a different random half of the rows, drawn with the seed,
    appears in each epoch.
    """

    rows: NDArray[np.int64]
    weight: float = 1.0

    @property
    def copies(self) -> tuple[int, int]:
        """(copies of every row per epoch, number of rows with one extra copy): 10 rows with weight 1.5 → (1, 5)."""
        num_copies = int(self.weight)
        return num_copies, round((self.weight - num_copies) * len(self.rows))

    @property
    def per_epoch(self) -> int:
        num_copies, extra = self.copies
        return num_copies * len(self.rows) + extra


class StepOrder:
    """Row order that concatenates epochs, shuffled if requested, and divides them into global batches.

    Args:
        parts: weighted rows, for example one part per source.
        batch_size: number of rows per step, over all ranks.
        batch_key: name of the batch-size setting, for error messages.

    Example with 20 rows, no shuffling and a batch size of 2: step 3 has rows [6, 7]; step 12 is in the second epoch and has
    rows [4, 5].

    Raises:
        DataError: an epoch has fewer rows than one global batch, so no step is possible.
    """

    def __init__(
        self,
        parts: Sequence[WeightedRows],
        *,
        batch_size: int,
        epochs: int = 1,
        max_steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        batch_key: str = "train.global_batch_size",
    ) -> None:
        self.parts, self.batch_size, self.seed, self.shuffle = list(parts), batch_size, seed, shuffle
        self.rows_per_epoch = sum(part.per_epoch for part in parts)
        if self.rows_per_epoch < batch_size:
            raise DataError(
                f"the training data has {self.rows_per_epoch} rows, but one global batch needs {batch_size} "
                f"({batch_key}), so not a single step is possible; lower {batch_key} or add data"
            )
        steps = epochs * self.rows_per_epoch // batch_size
        self.num_steps = steps if max_steps is None else min(steps, max_steps)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)  # a batch may span two epochs

    def indices(self, step: int) -> list[int]:
        """Return the row indices in the global batch for `step`, which counts from 0."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        return [int(self._epoch(p // self.rows_per_epoch)[p % self.rows_per_epoch]) for p in positions]

    def _make_epoch(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng((self.seed, epoch))
        rows = []
        for part in self.parts:
            num_copies, extra = part.copies
            rows += [part.rows] * num_copies
            if extra:
                rows.append(np.sort(random.choice(part.rows, size=extra, replace=False)))
        order: NDArray[np.int64] = np.concatenate(rows)
        if self.shuffle:
            random.shuffle(order)
        return order


def pick_evenly(count: int, limit: int | None) -> list[int]:
    """Return `limit` evenly spaced integers from 0 to count - 1, or all of them if `limit` is None: (10, 3) → [0, 3, 6]."""
    num_chosen = count if limit is None else min(count, limit)
    return [i * count // num_chosen for i in range(num_chosen)]
