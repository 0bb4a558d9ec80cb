"""Every row rendered as training does it, without training: what `dsreason data validate` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsreason.data.loader import BadRow, read_row
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.datasets.inspection import evenly
from dsreason.datasets.processes import Failure, Track, tracked, untracked


@dataclass(frozen=True)
class Rendering:
    """Row number → why it cannot be used, or None. `encode` raises DataError for such a sample."""

    dataset: SampleDataset
    encode: Callable[[Sample], object]

    def __call__(self, row: int) -> str | None:
        found = read_row(self.dataset, row, self.encode)
        return found.reason if isinstance(found, BadRow) else None


def render_rows(
    name: str, rendering: Rendering, *, limit: int | None = None, workers: int = 0, track: Track = untracked
) -> tuple[int, list[str]]:
    """How many rows were rendered (all, or `limit` evenly spaced ones), and a text for each that cannot be used, in order.

    A text names file, row and field. A row whose media crash a decoder is one of them: it costs its process only.
    """
    dataset = rendering.dataset
    rows = evenly(len(dataset), limit)
    problems = tracked(rendering, rows, workers, track, f"rendering {name}", "rows")
    return len(rows), [
        f"{dataset.location(row)}: {problem.reason}" if isinstance(problem, Failure) else problem
        for row, problem in zip(rows, problems, strict=True)
        if problem is not None
    ]
