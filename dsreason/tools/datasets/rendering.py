"""Every row rendered as training does it, without training: what `dsreason data validate` runs."""

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
"""Raises DataError for a sample that cannot be used."""


def render_rows(
    name: str, dataset: SampleDataset, encode: Encode, *, limit: int | None = None, workers: int = 0
) -> tuple[int, list[str]]:
    """Return how many rows were rendered (all, or `limit` evenly spaced ones), and a text for each that cannot be used, in order.

    A text names file, row and field. A row whose media crash a decoder is one of them: it costs its process only.
    """
    rows = pick_evenly(len(dataset), limit)
    render = partial(render_row, dataset, encode)
    results = run_tracked(render, rows, dataset.describe_location, workers, f"rendering {name}", "rows")
    return len(rows), [str(result) for result in results if isinstance(result, DataError)]


def render_row(dataset: SampleDataset, encode: Encode, row: int) -> None:
    encoded = read_row(dataset, row, encode)
    if isinstance(encoded, DataError):
        raise encoded
