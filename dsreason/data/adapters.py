"""Lookup of data adapters, which convert a data set's raw rows to `Sample` objects.

An adapter is a module, or an object in a module, with a function `to_sample(row, data) -> Sample`; the parameter `data` is
optional. An adapter may also have a function `rows(data) -> Sequence`, which replaces the default reader,
`dsreason.data.rows.read_rows`. This function is called once per split, with a plain name as `data.split`; ranges such as
`train[:100]` and `data.limit` are applied to the rows that it returns.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from dsreason.config.schema_data import SourceConfig
from dsreason.data.rows import ListRows, NamedRows, SelectedRows, read_rows
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError, DsReasonError
from dsreason.user_code import find_code


@dataclass(frozen=True)
class Adapter:
    """A data adapter's functions and the name by which it was looked up."""

    name: str
    to_sample: Callable[[Any, SourceConfig], Sample]
    read: Callable[[SourceConfig], Sequence[Any]]

    def rows(self, data: SourceConfig) -> NamedRows:
        """Read the rows selected by the splits, ranges and limit in `data`."""
        parts = []
        for split in parse_splits(data.split):
            rows = self._read(data.model_copy(update={"split": split.name}))
            name = f"{data.path or self.name} ({split.name})" if split.name != "train" else data.path or self.name
            parts.append((rows if isinstance(rows, NamedRows) else ListRows(rows, name), split))
        return select(parts, data.limit)

    def _read(self, data: SourceConfig) -> Sequence[Any]:
        try:
            rows = self.read(data)
        except DsReasonError:
            raise
        except Exception as error:
            raise DataError(
                f"adapter {self.name}: rows(data) failed on {data.path}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(rows, Sized):
            raise DataError(
                f"adapter {self.name}: rows(data) must return a list or another sequence with a length, but returned "
                f"{type(rows).__name__}"
            )
        return rows

    def __reduce__(self) -> tuple[Callable[[str], Adapter], tuple[str]]:
        # Functions from a file loaded by path cannot be unpickled, so a spawned worker process looks up the adapter by name.
        return find_adapter, (self.name,)


def list_shipped_adapters() -> list[str]:
    """Return the short names of the adapters that dsreason ships."""
    import data_adapters

    return sorted(module.name for module in pkgutil.iter_modules(data_adapters.__path__))


def find_adapter(name: str) -> Adapter:
    """Find an adapter by name: a shipped adapter, `package.module`, or the path of a `.py` file, optionally followed by `:attr`.

    Raises:
        ConfigError: the adapter does not exist, cannot be imported, or has no `to_sample`.
    """
    target, shipped = name.partition(":")[0], list_shipped_adapters()
    advice = f"Shipped: {', '.join(shipped)}. Your own: package.module, package.module:attr or the path of a .py file"
    adapter = find_code(
        f"data_adapters.{name}" if target in shipped else name, f'data.adapter "{name}"', shipped, advice
    )
    if "to_sample" not in dir(adapter):
        raise ConfigError(
            f'data.adapter "{name}": has no function to_sample(row, data); add the function, or append :attr to select an '
            "object that has one"
        )
    return Adapter(name, _accept_data(adapter.to_sample), adapter.rows if "rows" in dir(adapter) else read_rows)


def _accept_data(to_sample: Callable[..., Sample]) -> Callable[[Any, SourceConfig], Sample]:
    if len(inspect.signature(to_sample).parameters) > 1:
        return to_sample
    return lambda row, data: to_sample(row)


# ---------------------------------------------------------------- splits


@dataclass(frozen=True)
class Split:
    """A split such as `train`, `train[:100]` or `train[10%:20%]`, with the semantics of Hugging Face `datasets`."""

    name: str
    start: str | None = None
    stop: str | None = None

    def span(self, length: int) -> range:
        """Return the row indices that the split selects from `length` rows; bounds are clipped, as in a Python slice."""
        return range(length)[_parse_bound(self.start, length) : _parse_bound(self.stop, length)]


def _parse_bound(bound: str | None, length: int) -> int | None:
    if bound is None or not bound.endswith("%"):
        return None if bound is None else int(bound)
    return round(int(bound[:-1]) * length / 100)


_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


def parse_splits(split: str | Sequence[str]) -> list[Split]:
    """Parse `data.split`: one split, a list of splits, or several splits joined with `+`."""
    expressions = [split] if isinstance(split, str) else split
    splits = []
    for expression in (part.replace(" ", "") for text in expressions for part in text.split("+")):
        match = _SPLIT.fullmatch(expression)
        if match is None:
            raise ConfigError(
                f'data.split ("{expression}") is not a valid split; use a form such as train, train[:100] or '
                "train[10%:20%]"
            )
        bounds = match.group(2), match.group(3)
        if any(b is not None and b.endswith("%") and abs(int(b[:-1])) > 100 for b in bounds):
            raise ConfigError(f'data.split ("{expression}"): percentages must be at most 100%')
        splits.append(Split(match.group(1), *bounds))
    return splits


def select(parts: Iterable[tuple[NamedRows, Split]], limit: int | None) -> NamedRows:
    """Concatenate the selected ranges of the splits and keep at most `limit` rows; None keeps all rows."""
    selected = SelectedRows([(rows, split.span(len(rows))) for rows, split in parts])
    return selected if limit is None else selected[:limit]


def rename_columns(row: Any, columns: dict[str, str]) -> Any:
    """Rename a row's columns to the fields that the adapter reads; an existing column with the new name is replaced.

    Raises:
        DataError: the row lacks a column that `columns` names.
    """
    if not columns:
        return row
    if not isinstance(row, dict):
        raise DataError(
            f"data.columns names {', '.join(columns.values())}, but the row has no columns: {row!r:.100}; write each row as "
            "a JSON object"
        )
    if missing := [column for column in columns.values() if column not in row]:
        raise DataError(
            f"data.columns names {missing[0]!r}, but the row has only the columns {', '.join(map(str, row))}"
        )
    unmapped = {name: value for name, value in row.items() if name not in {*columns, *columns.values()}}
    return unmapped | {field: row[column] for field, column in columns.items()}
