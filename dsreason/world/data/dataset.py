"""Data sets for world models; their clips are read on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dsreason.errors import DataError
from dsreason.files.remote import check_location
from dsreason.problems import join_first
from dsreason.world.data import builtin, curator, folder, mock, prompts, shards
from dsreason.world.data.clips import read_clip
from dsreason.world.data.rows import CheckedRows
from dsreason.world.schema import WorldDataConfig
from dsreason.world.types import ClipSize, WorldRow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorldDataset:
    """The rows of a data set and the function that reads their clips; picklable, because loader workers receive a copy."""

    rows: Sequence[WorldRow]
    read: Callable[[WorldRow, ClipSize], Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> WorldRow:
        return self.rows[index]

    def read_clip(self, row: WorldRow, size: ClipSize) -> Tensor:
        """Read the first frames of the row's clip at `size.fps`, resized and centre-cropped: uint8 `[3, T, H, W]`.

        Raises:
            DataError: the row has no clip, or the clip is unreadable, too short or has too few frames per second; the message
                names the row.
        """
        if row.clip is None:
            raise DataError(f"{row.id}: the row has a prompt but no clip; use data with clips (data.format)")
        return self.read(row, size)


def open_world_data(data: WorldDataConfig, seed: int) -> tuple[WorldDataset, WorldDataset]:
    """Return a data set with the training rows and one with the held-out rows; the latter may be empty.

    Args:
        seed: seed for generating rows and for choosing the held-out rows.

    Raises:
        ConfigError, DataError: the data does not exist, a row is unusable (with `on_bad_row = "error"`), or no training row
            remains.
    """
    training = open_rows(data, seed)
    if isinstance(data.validation, str):
        held_out = data.model_copy(update={"path": data.validation, "limit": None})
        return training, open_rows(held_out, seed + 1, "data.validation")
    count = len(training)
    number = max(1, round(data.validation * count)) if 0 < data.validation < 1 else int(data.validation)
    if number >= count:
        raise DataError(f"data.validation ({data.validation}) leaves none of the {count} rows for training; lower it")
    order = np.random.default_rng(seed).permutation(count)
    return select_rows(training, np.sort(order[number:])), select_rows(training, np.sort(order[:number]))


def select_rows(dataset: WorldDataset, numbers: Sequence[int] | np.ndarray) -> WorldDataset:
    return replace(dataset, rows=[dataset.rows[int(number)] for number in numbers])


def open_rows(data: WorldDataConfig, seed: int, key: str = "data.path") -> WorldDataset:
    """Read the rows from the file or folder `data.path`, up to `data.limit`; error messages refer to the setting as `key`."""
    check_location(key, data.path)
    try:
        rows, read = FORMATS[data.format](data, seed)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if rows.bad:
        problem = f"{len(rows.bad)} rows of {data.path} cannot be used: {join_first(rows.bad)}"
        if data.on_bad_row == "error":
            raise DataError(f'{problem}; correct them, or skip them with data.on_bad_row = "skip"')
        log.warning("%s; they are skipped", problem)
    if not rows.rows:
        raise DataError(f"{data.path or data.format}: the data set is empty")
    return WorldDataset(rows.rows[: data.limit], read)


FORMATS: dict[str, Callable[[WorldDataConfig, int], tuple[CheckedRows, Callable[[WorldRow, ClipSize], Tensor]]]] = {
    "builtin": lambda data, seed: (builtin.make_rows(seed, data.path), builtin.read_clip),
    "mock": lambda data, seed: (mock.make_rows(), mock.read_clip),
    "prompts": lambda data, seed: (prompts.read_prompts(data.path), read_clip),
    "folder": lambda data, seed: (folder.read_folder(data.path), read_clip),
    "curator": lambda data, seed: (curator.read_windows(data.path), curator.read_clip),
    "shards": lambda data, seed: (shards.read_shards(data.path), shards.read_clip),
}
