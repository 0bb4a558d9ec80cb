"""Checks for CSV and TSV files. They are needed because pandas shifts or drops fields if a row does not match the header."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsreason.errors import DataError

MAX_FIELD_CHARACTERS = 1 << 28


def read_csv_options(paths: Sequence[Path], names: Sequence[str]) -> dict[str, Any]:
    """Return the pandas options that read every cell as text, so that `007` and `none` stay unchanged.

    `names` are the file names to use in messages. Raise DataError if the files' columns or delimiters differ, or if a row has
    more or fewer fields than the header.
    """
    import datasets

    delimiter, columns = check_csv(paths[0], names[0])
    for path, name in zip(paths[1:], names[1:], strict=True):
        other_delimiter, other_columns = check_csv(path, name)
        if (other_delimiter, other_columns) != (delimiter, columns):
            raise DataError(
                f"{name}: has the columns {other_delimiter.join(other_columns)}, but {names[0]} has "
                f"{delimiter.join(columns)}; use the same header in all files"
            )
    features = datasets.Features({column: datasets.Value("string") for column in columns})
    return {"features": features, "keep_default_na": False, "sep": delimiter}


def check_csv(path: Path, name: str) -> tuple[str, list[str]]:
    """Return a file's delimiter and columns. Raise DataError with the line number if a row does not match the header."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = find_delimiter(file.readline(), is_tsv=path.suffix.lower() == ".tsv")
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            columns = next(reader, [])
            check_header(columns, name)
            for fields in reader:
                line = reader.line_num
                if fields and len(fields) != len(columns):
                    raise DataError(
                        f"{name}, line {line}: has {len(fields)} fields, but the header has {len(columns)}; put texts that "
                        f"contain {delimiter!r} in double quotes, and remove {delimiter!r} from the end of lines"
                    )
    except (csv.Error, UnicodeDecodeError) as error:
        where = "the first line has no column names" if line == 1 else f"a row after line {line} has no fields"
        raise DataError(f"{name}: {where} that can be read: {error}; save the file as CSV in UTF-8") from error
    return delimiter, columns


def find_delimiter(header: str, *, is_tsv: bool) -> str:
    """Return the delimiter that a header uses: a comma, or, in a header without commas, a semicolon or a tab."""
    if is_tsv:
        return "\t"
    return next((delimiter for delimiter in ",;\t" if delimiter in header), ",")


def check_header(columns: Sequence[str], name: str) -> None:
    for number, column in enumerate(columns, start=1):
        if not column.strip():
            raise DataError(f"{name}, line 1: column {number} has no name; name it, or remove the column")
        if column in columns[: number - 1]:
            raise DataError(f"{name}, line 1: has two columns {column!r}; rename or remove one of them")
