"""Types, compression and splits of data files, derived from their names."""

from __future__ import annotations

import re
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from dsreason.errors import DataError
from dsreason.files.archives import PACKED_SUFFIXES

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv"}
INDEX_FILES = ("dataset_info.json", "dataset_infos.json")

LIST_KEYS = ("data", "rows", "examples", "instances", "samples", "train")
"""Keys under which a JSON object may contain the list of rows. Such an object is not itself a row."""
START_BYTES, BLOCK_BYTES = 4096, 1 << 20
MAX_LIST_BYTES = 4 * 1024**3


def is_data_file(name: str) -> bool:
    return strip_packing(PurePosixPath(name)).suffix.lower() in (*JSON_SUFFIXES, *TABLE_BUILDERS)


def strip_packing(path: PurePath) -> PurePath:
    """Return the path without the compression suffix: `train.jsonl.gz` → `train.jsonl`."""
    return path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path


def find_split_files(folder: Path, split: str) -> list[Path]:
    """Return the data files whose names contain the split as a word. They must all have the same type.

    If no file name contains the name of any split, all files belong to `train`.
    """
    nested = next((p for name in ("metadata.jsonl", "metadata.csv") if (p := folder / split / name).is_file()), None)
    if nested is not None:
        raise DataError(f"{nested}: is the list of a split's media; set data.path to {nested.parent}")
    paths = [
        p for p in (*folder.glob("*"), *folder.glob("data/*")) if is_data_file(p.name) and p.name not in INDEX_FILES
    ]
    words = {path: set(re.split(r"[^a-zA-Z0-9]+", strip_packing(path).stem)) for path in sorted(paths)}
    if not words:
        raise DataError(f"{folder}: contains no JSON, JSON lines, Parquet, Arrow, CSV or TSV file; check data.path")
    stems = {path: strip_packing(path).stem for path in words}
    files = [f for f in words if stems[f] == split or stems[f].startswith(f"{split}-")]
    files = files or [f for f in words if split in words[f]]
    split_words = {"train", "test", "val", "validation", "valid", "dev", "eval"}
    if not files and split == "train" and not any(split_words & found for found in words.values()):
        files = list(words)
    if not files:
        names = ", ".join(f.name for f in list(words)[:8])
        raise DataError(f'{folder}: has no file for split "{split}" among {names}; change data.split')
    kinds = {get_type(file): file.name for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{folder}: has files of several types for the split {split!r}: {', '.join(sorted(kinds.values()))}; set data.path "
            "to one of them"
        )
    return files


def get_type(path: Path) -> str:
    suffix = strip_packing(path).suffix.lower()
    return "json" if suffix in JSON_SUFFIXES else suffix


def read_start(path: Path, name: str) -> bytes:
    """Return the first bytes of a text file. Raise DataError if it is UTF-16."""
    with path.open("rb") as file:
        start = file.read(START_BYTES)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{name}: is UTF-16; save it as UTF-8")
    return start


def check_document(document: Any, name: str, *, several_lines: bool) -> None:
    """Raise DataError if a file's only JSON value is an object that contains the list of rows or spans several lines."""
    if not isinstance(document, dict):
        return
    key = next((key for key in LIST_KEYS if isinstance(document.get(key), list)), None)
    if key is not None:
        raise DataError(f"{name}: has its rows in the list {key!r} of an object; save only this list")
    if several_lines:
        raise DataError(f"{name}: has one object on several lines; write each row on one line, or write a list of rows")


def is_hub_name(path: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path) is not None and not is_data_file(path)


def is_list(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def check_list_size(path: Path, size: int) -> None:
    if size > MAX_LIST_BYTES:
        raise DataError(
            f"{path}: has {size} bytes, but a JSON list is read into memory and may have at most {MAX_LIST_BYTES}; "
            "write one row per line to a .jsonl file"
        )
