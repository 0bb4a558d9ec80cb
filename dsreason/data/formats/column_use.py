"""Report on which columns and message keys an adapter uses, keeps for rewards, or ignores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsreason.data.adapters import rename_columns
from dsreason.data.formats.media_items import FILE_KEYS
from dsreason.data.formats.row_formats import describe_detection
from dsreason.data.formats.turns import ROLE_KEYS
from dsreason.data.order import pick_evenly
from dsreason.data.sources import DataSource
from dsreason.data.types import TOKEN_TYPES
from dsreason.errors import DsReasonError

MOST_ROWS = 100
"""Maximum number of rows to read for the report."""


class TrackedRow(dict[str, Any]):
    """A row, or a message or media object in a row, that records which of its keys are read."""

    def __init__(self, items: Mapping[str, Any], name: str, read: set[str]) -> None:
        super().__init__({key: track(value, f"{name}{key}[].", read) for key, value in items.items()})
        self._name, self._read = name, read

    def __getitem__(self, key: str) -> Any:
        self._read.add(f"{self._name}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._name}{key}")
        return super().get(key, default)


def track(value: Any, name: str, read: set[str]) -> Any:
    """Wrap messages and media objects in `TrackedRow`; return other values unchanged."""
    if name.count("[]") != 1 or not list_objects(value):
        return value
    return (
        [TrackedRow(item, name, read) for item in value] if isinstance(value, list) else TrackedRow(value, name, read)
    )


def list_objects(value: Any) -> list[dict[str, Any]]:
    """Return the messages or media objects in a value; [] if the value contains anything else."""
    items = value if isinstance(value, list) else [value]
    keys = {*ROLE_KEYS, *FILE_KEYS, *TOKEN_TYPES} if items is value else {*FILE_KEYS, *TOKEN_TYPES}
    return items if all(isinstance(item, dict) and item.keys() & keys for item in items) else []


@dataclass
class ColumnUse:
    """A data set's columns, grouped by use. Keys of messages and media objects are written like `messages[].loss`."""

    name: str
    """Path of the data set, or name of its adapter."""
    num_rows: int = 0
    """Number of usable rows among the rows read."""
    num_read: int = 0
    num_total: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    """Description of a detected format → number of rows in it; empty unless the adapter is `auto`."""
    used: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    """Columns kept in `sample.meta`, which rewards can read."""
    ignored: set[str] = field(default_factory=set)

    def describe(self) -> str:
        """Describe in one line how the columns are used."""
        formats = [f"{describe_count(count)} the {description}" for description, count in self.formats.most_common()]
        used_columns = sorted(column for column in self.used if "[]" not in column)
        parts = [f"{self.name}: {', '.join(formats) or describe_count(self.num_rows, '')}"]
        parts[0] += f", uses {', '.join(used_columns)}" if used_columns else ""
        if not self.num_rows:
            parts = [f"{self.name}: no usable row among {describe_count(self.num_read, '')}"]
        parts += (
            [f"read {self.num_read} of {self.num_total} rows for this list"] if self.num_read < self.num_total else []
        )
        parts += [f"keeps {', '.join(sorted(self.kept))} for rewards"] if self.kept else []
        parts += [f"ignores {', '.join(sorted(self.ignored))}"] if self.ignored else []
        return "; ".join(parts)


def describe_count(count: int, verb: str = "have") -> str:
    """Return a row count with a matching verb: `1 row has`, `2 rows have`."""
    return f"{count} row{'s' * (count != 1)} {'has' if verb and count == 1 else verb}".strip()


def find_column_use(source: DataSource, limit: int = MOST_ROWS) -> ColumnUse:
    """Return how the adapter uses the columns, based on up to `limit` evenly spaced rows; bad rows are skipped."""
    indices = pick_evenly(len(source.rows), limit)
    use = ColumnUse(source.config.path or source.config.adapter, num_read=len(indices), num_total=len(source.rows))
    for index in indices:
        try:
            row = rename_columns(source.rows[index], source.config.columns)
        except DsReasonError:
            continue
        if isinstance(row, dict):
            add_row(use, row, source)
    use.ignored -= use.used | use.kept
    return use


def add_row(use: ColumnUse, row: dict[str, Any], source: DataSource) -> None:
    read: set[str] = set()
    try:
        sample = source.adapter.to_sample(TrackedRow(row, "", read), source.config)
        if source.config.adapter == "auto" and source.config.path:
            use.formats[describe_detection(row)] += 1
    except Exception:  # noqa: BLE001 (an adapter may raise anything; the check of the rows reports it)
        return
    use.num_rows += 1
    row_keys = set(iter_keys(row))
    kept = row_keys & sample.meta.keys()
    use.kept |= kept
    use.used |= (row_keys & read) - kept
    columns_kept = tuple(f"{column}[]." for column in kept)
    use.ignored |= {key for key in row_keys - read - kept if not key.startswith(columns_kept)}


def iter_keys(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the columns that have a value, and the keys of the messages or media objects in them."""
    for column, value in row.items():
        if value is None or value == "" or value == []:
            continue
        yield column
        for item in list_objects(value):
            yield from (f"{column}[].{key}" for key, inner in item.items() if inner is not None)
