"""A data set's rows, read one at a time from JSON lists, JSON lines or Hugging Face data sets.

Messages number rows and lines from 1, as editors do. This module never unpickles data and never runs code from a data set.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.csv_files import read_csv_options
from dsreason.data.formats.data_files import (
    BLOCK_BYTES,
    START_BYTES,
    TABLE_BUILDERS,
    check_document,
    check_list_size,
    find_split_files,
    is_hub_name,
    is_list,
    read_start,
    strip_packing,
)
from dsreason.data.formats.data_files import JSON_SUFFIXES as JSON_SUFFIXES
from dsreason.data.formats.data_files import is_data_file as is_data_file
from dsreason.data.formats.tables import load_intact_table
from dsreason.data.options import format_options as format_options  # adapters import these names from here
from dsreason.data.options import option_lines as option_lines
from dsreason.data.options import options_field as options_field
from dsreason.data.options import own_letter as own_letter
from dsreason.errors import ConfigError, DataError
from dsreason.files.address import is_s3
from dsreason.files.archives import PACKED_SUFFIXES, Budget, open_unpacked, unpack_file
from dsreason.files.own_files import README, check_configs, check_hub_configs, check_saved, has_configs, is_saved
from dsreason.files.remote import fetch_file, fetch_folder
from dsreason.problems import describe_missing_file, describe_parse_error

if TYPE_CHECKING:
    import datasets

MAX_LINE_BYTES = 1 << 28
"""Maximum length of a line in bytes (256 MiB), which keeps a file without line breaks from filling the memory."""
UNREADABLE = (ValueError, RecursionError)
"""Exceptions that the parser raises for invalid JSON or UTF-8, 5000-digit numbers, or a thousand levels of nesting."""
TEXT_BUILDERS = ("csv", "json", "text")
FOLDER_BUILDERS = ("parquet", "arrow", "csv", "json", "text", "imagefolder", "videofolder", "webdataset")
"""Builders in `datasets` that may read a local folder with a README. Others, such as HDF5 and Lance, follow links to
files elsewhere."""


class NamedRows(Sequence[Any]):
    """Sequence of rows that can tell the file and line of each row."""

    name: str
    """Name of the file or data set, for error messages."""

    def describe_location(self, index: int) -> str:
        """Describe the location of the row at `index` for error messages: `train.jsonl, row 3`."""
        return f"{self.name}, row {index + 1}"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SelectedRows([(self, range(*index.indices(len(self))))])
        return self.row(range(len(self))[index])

    @abstractmethod
    def row(self, index: int) -> Any:
        """Return the row at `index`, which must not be negative."""


class ListRows(NamedRows):
    """Rows in a sequence, such as the result of an adapter's `rows()`."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Any:
        return self.rows[index]


class JsonListRows(NamedRows):
    """Rows in a file that contains a JSON list.

    The rows are stored as JSON text in one block of bytes. A list of Python objects would take several times as much memory, and
    every worker process would need its own copy, because reference-count updates defeat copy-on-write.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or str(path)
        check_list_size(path, path.stat().st_size)
        try:
            rows = json.loads(path.read_bytes().decode("utf-8-sig"))
        except UNREADABLE as error:
            raise DataError(
                f"{self.name}: the file is not valid JSON ({describe_parse_error(error)}); correct it"
            ) from error
        if not isinstance(rows, list):
            raise DataError(
                f"{self.name}: the file must contain a JSON list of rows, or one row per line; got {type(rows).__name__}"
            )
        texts = [json.dumps(row, ensure_ascii=False).encode(errors="surrogatepass") for row in rows]
        self.ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        self.block = b"".join(texts)

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, index: int) -> Any:
        start = self.ends[index - 1] if index else 0
        return json.loads(self.block[start : self.ends[index]])


def _iter_lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{path}, line {number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB; write one row per "
                "line, and store large media in separate files"
            )
        yield line


class JsonLinesRows(NamedRows):
    """Rows in a file with one JSON object per line. Only line offsets stay in memory; each access reads and parses a line."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path, self.name = path, name or str(path)
        offsets, lines, position = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(_iter_lines(file, path), start=1):
                if line.strip():
                    offsets.append(position)
                    lines.append(number)
                position += len(line)
        self.offsets = np.array(offsets, dtype=np.int64)
        self.lines = np.array(lines, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def row(self, index: int) -> Any:
        with self.path.open("rb") as file:
            file.seek(int(self.offsets[index]))
            line = file.readline()
        try:
            return json.loads(line.decode("utf-8-sig"))
        except UNREADABLE as error:
            raise DataError(
                f"{self.name}, line {self.lines[index]}: the line is not valid JSON ({describe_parse_error(error)}); "
                "correct it"
            ) from error

    def describe_location(self, index: int) -> str:
        line = int(self.lines[index])
        return super().describe_location(index) + (f" (line {line})" if line != index + 1 else "")


class TableRows(NamedRows):
    """Rows in a Hugging Face data set. Images and videos are not decoded but remain `{"bytes": …, "path": …}`."""

    def __init__(self, table: datasets.Dataset, name: str) -> None:
        self.features = _disable_decoding(table.features)
        self.table = table.with_format("arrow")
        self.name = name

    def __len__(self) -> int:
        return len(self.table)

    def row(self, index: int) -> Any:
        return self.features.decode_example(self.table[index : index + 1].to_pylist()[0])


class SelectedRows(NamedRows):
    """Concatenated ranges of rows from other sequences; messages name each row's original location."""

    def __init__(self, parts: Sequence[tuple[NamedRows, range]]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(span) for _, span in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def _find_source(self, index: int) -> tuple[NamedRows, int]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        rows, span = self.parts[part]
        return rows, span[index - (int(self.ends[part - 1]) if part else 0)]

    def row(self, index: int) -> Any:
        rows, position = self._find_source(index)
        return rows[position]

    def describe_location(self, index: int) -> str:
        rows, position = self._find_source(index)
        return rows.describe_location(position)


def read_rows(data: SourceConfig) -> NamedRows:
    """Read one split's rows from `data.path`, which is a file or folder (local or in S3), or a data set on the Hub."""
    if not data.path:
        raise ConfigError(
            f"data.path is empty; set it to the file, folder or Hub data set that the adapter {data.adapter} should read"
        )
    path = _fetch(data.path) if is_s3(data.path) else Path(data.path).expanduser()
    if path.is_file():
        if data.split != strip_packing(path).stem:
            only_train(data, f"{path}: a single file")
        return _read_files([path], data)
    if path.is_dir():
        return _read_folder(path, data)
    if path.exists():
        raise DataError(f"data.path: {path.absolute()} {describe_missing_file(path)}")
    if not is_hub_name(data.path):
        raise DataError(f"data.path: {path.absolute()} does not exist")
    check_hub_configs(data.path, data.revision)
    return _load_table(data.path, f"{data.path} ({data.subset or 'default'}, {data.split})", data)


def _fetch(address: str) -> Path:
    """Copy a file, or the data files in a folder, from S3 to the local disk; media files are fetched later, on first use."""
    if is_data_file(address):
        return fetch_file(address)
    return fetch_folder(address, lambda name: is_data_file(name) or PurePosixPath(name).name == README)


def text_field(row: Mapping[str, Any], field: str) -> str:
    """Return the string in a row's field. Raise KeyError if the field is missing, and DataError if it is not a string."""
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"field {field!r} must be a string; got {text!r:.100}")
    return text


def get_optional_text(row: Mapping[str, Any], field: str) -> str | None:
    """Return the string in a row's field; None if it is missing, null or blank. Raise DataError if it is not a string."""
    if row.get(field) is None:
        return None
    text = text_field(row, field)
    return text if text.strip() else None


def to_list(value: Any) -> list[Any]:
    """Return a field's value as a list: a list is returned unchanged, a single item is wrapped, and an empty value gives []."""
    if not value:
        return []
    return value if isinstance(value, list) else [value]


def only_train(data: SourceConfig, what: str) -> None:
    """Raise DataError unless `data.split` is "train", the only valid value for data without splits."""
    if data.split != "train":
        raise DataError(f'{what} has no splits, so data.split must be "train"; got "{data.split}"')


def _read_files(paths: Sequence[Path], data: SourceConfig) -> NamedRows:
    names = [str(path) for path in paths]
    suffix = strip_packing(paths[0]).suffix.lower()
    if suffix not in (*JSON_SUFFIXES, *TABLE_BUILDERS):
        suffixes = ", ".join((*JSON_SUFFIXES, *TABLE_BUILDERS))
        raise DataError(
            f"{paths[0]}: the suffix must be one of {suffixes}, optionally followed by {' or '.join(PACKED_SUFFIXES)}; "
            f"got {suffix!r}"
        )
    files = [unpack_file(path) if path.suffix.lower() in PACKED_SUFFIXES else path for path in paths]
    if suffix in TABLE_BUILDERS:
        name = names[0] if len(paths) == 1 else f"{names[0]} and {len(paths) - 1} more"
        whole_split = data.model_copy(update={"subset": None, "revision": None, "split": "train"})
        is_csv = TABLE_BUILDERS[suffix] == "csv"
        for file, packed in zip(files, names, strict=True) if is_csv else ():
            read_start(file, packed)
        options = read_csv_options(files, names) if is_csv else {}
        listed = {"train": [str(file) for file in files]}
        return _load_table(TABLE_BUILDERS[suffix], name, whole_split, listed, options)
    parts = [_read_json(file, name) for file, name in zip(files, names, strict=True)]
    return parts[0] if len(parts) == 1 else SelectedRows([(part, range(len(part))) for part in parts])


def _read_json(path: Path, name: str) -> NamedRows:
    """Read a JSON list or JSON lines; the suffix does not matter, because many `.json` files contain one object per line."""
    if is_list(read_start(path, name)):
        return JsonListRows(path, name)
    rows = JsonLinesRows(path, name)
    _check_rows(rows)
    return rows


def _check_rows(rows: JsonLinesRows) -> None:
    """Raise DataError if the file is a single JSON object that contains the list of rows or spans several lines."""
    if not len(rows) or rows.path.stat().st_size > MAX_LINE_BYTES:
        return
    try:
        document = rows.row(0)
        if len(rows) > 1:
            return
    except DataError:
        try:
            document = json.loads(rows.path.read_bytes().decode("utf-8-sig"))
        except UNREADABLE:
            return  # the line's error is reported when it is read
    check_document(document, rows.name, several_lines=len(rows) > 1)


def _check_text(path: Path) -> None:
    """Raise DataError if the file has a list or a line above our limits, because `datasets` would read all of it into memory."""
    budget = Budget(path)
    with open_unpacked(path) as file:
        start = file.read(START_BYTES)
        file.seek(0)
        if is_list(start):
            for block in iter(lambda: file.read(BLOCK_BYTES), b""):
                budget.spend(len(block))
            check_list_size(path, budget.spent)
        else:
            for line in _iter_lines(file, path):
                budget.spend(len(line))


def _read_folder(folder: Path, data: SourceConfig) -> NamedRows:
    if is_saved(folder):
        return _read_saved(folder, data)
    if has_configs(folder):
        check_configs(folder)
        return _load_table(str(folder), f"{folder} ({data.subset or 'default'}, {data.split})", data)
    inside = folder / data.subset if data.subset else folder
    if data.subset and is_saved(inside):
        return _read_saved(inside, data)
    return _read_files(find_split_files(inside, str(data.split)), data)


def _read_saved(folder: Path, data: SourceConfig) -> NamedRows:
    """Read a folder written by `save_to_disk`, which contains one table or one table per split."""
    import datasets

    check_saved(folder)
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.Dataset):
        if data.split != str(saved.split):
            only_train(data, f"{folder}: this data set")
        return TableRows(saved, str(folder))
    if data.split not in saved:
        raise DataError(
            f'{folder}: the data set has no split "{data.split}"; set data.split to one of {", ".join(saved)}'
        )
    return TableRows(saved[data.split], f"{folder} ({data.split})")


def _load_table(
    path: str,
    name: str,
    data: SourceConfig,
    data_files: dict[str, list[str]] | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> TableRows:
    import datasets

    try:
        kind = path
        if data_files is None and Path(path).is_dir():
            # `datasets` caches tables by the file patterns in the README, so it would reuse a table for another folder with the
            # same patterns, or after a file has changed. For explicitly listed files, it compares modification times.
            builder = datasets.load_dataset_builder(path, data.subset, revision=data.revision)
            kind = type(builder).__module__.rpartition(".")[2]
            if kind not in FOLDER_BUILDERS:
                raise DataError(
                    f"{name}: files of type {kind} are not supported; convert them to JSON lines or Parquet"
                )
            data_files = builder.config.data_files
        if data_files is not None and kind in TEXT_BUILDERS:
            for file in dict.fromkeys(file for files in data_files.values() for file in files):
                _check_text(Path(file))
        read = partial(datasets.load_dataset, path, data.subset, data_files=data_files, split=data.split)
        table = load_intact_table(name, lambda mode: read(revision=data.revision, download_mode=mode, **options))
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(
            f"{name}: cannot be read: {error}{cause}; check data.path, data.subset, data.split and data.revision"
        ) from error
    return TableRows(table, name)


def _disable_decoding(features: Any) -> Any:
    """Return the features with decoding disabled, so that `datasets` returns media items as bytes or paths."""
    import datasets

    def walk(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {name: walk(inner) for name, inner in feature.items()}
        if isinstance(feature, (datasets.List, datasets.LargeList)):
            return type(feature)(walk(feature.feature))
        return type(feature)(decode=False) if "decode" in vars(feature) else feature

    return datasets.Features(walk(dict(features)))
