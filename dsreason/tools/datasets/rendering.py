"""Functions that render every row exactly as training does, but without a training step, for `dsreason data validate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dsreason.data.loader import read_row
from dsreason.data.order import pick_evenly
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.tools.datasets.processes import run_tracked

Encode = Callable[[Sample], object]
"""Function that encodes a sample; it raises DataError if the sample cannot be used."""


def render_rows(
    name: str, dataset: SampleDataset, encode: Encode, *, limit: int | None = None, workers: int = 0
) -> tuple[int, list[str]]:
    """Render all rows, or `limit` evenly spaced rows.

    A row whose media crash a decoder is also reported; the crash ends only a worker process.

    Returns:
        The number of rendered rows, and a message with file, row and field for each unusable row, in order.
    """
    rows = pick_evenly(len(dataset), limit)
    render = partial(render_row, dataset, encode)
    results = run_tracked(render, rows, dataset.describe_location, workers, f"rendering {name}", "rows")
    return len(rows), [str(result) for result in results if isinstance(result, DataError)]


def render_row(dataset: SampleDataset, encode: Encode, row: int) -> None:
    encoded = read_row(dataset, row, encode)
    if isinstance(encoded, DataError):
        raise encoded
