"""Files with one prompt per line, or one JSON object per line with a `prompt`, an optional `video` and fields for rewards."""

from __future__ import annotations

import json
from pathlib import Path

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.own_files import is_inside
from dsreason.files.remote import fetch_file, join_address, read_address
from dsreason.problems import describe_missing_file, describe_parse_error
from dsreason.secrets import mask_credentials
from dsreason.world.data.rows import CheckedRows

ADVICE = 'a text file with one prompt per line, or a .jsonl file with {"prompt": …} per line'
JSON_LINES = (".jsonl", ".ndjson")
STRUCTURED = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".yaml", ".yml", ".toml", ".xml", ".xlsx")
"""Suffixes of structured formats; the lines of such files are not prompts."""
MAX_BYTES = 2 * 1024**3


def read_prompts(path: str) -> CheckedRows:
    """Read the rows from a text file, or from a JSONL file if the suffix is `.jsonl` or `.ndjson`; skip empty lines.

    A `video` is a path relative to the file's folder, an absolute path, or an `s3://` URI.

    Raises:
        DataError: the file is missing or not UTF-8, or its lines are not prompts.
    """
    if not path:
        raise DataError(f"is empty; set it to {ADVICE}")
    suffix = Path(path).suffix.lower()
    if suffix in STRUCTURED:
        raise DataError(f"{path}: prompts cannot be read from a {suffix} file; use {ADVICE}")
    rows = CheckedRows()
    for number, line in enumerate(split_lines(path), 1):
        row_id = f"{path}:{number}"
        if line.strip() and suffix in JSON_LINES:
            _add_object(rows, path, row_id, line)
        elif _is_object(line):
            raise DataError(
                f"{row_id}: is JSON, but each line of a {suffix or 'text'} file must be a prompt; use {ADVICE}"
            )
        elif line.strip():
            rows.add(row_id, {"prompt": line}, None)
    return rows


def split_lines(path: str) -> list[str]:
    """Read the lines of a file. Unicode line separators such as U+2028 do not end a line; prompts may contain them."""
    file = fetch_file(path) if is_s3(path) else Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{path}: {describe_missing_file(file)}")
    if (size := file.stat().st_size) > MAX_BYTES:
        raise DataError(f"{path}: has {size} bytes, but a file of prompts may have at most {MAX_BYTES}; use {ADVICE}")
    try:
        return file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def _is_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _add_object(rows: CheckedRows, path: str, row_id: str, line: str) -> None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        rows.bad.append(f"{row_id}: is not JSON: {describe_parse_error(error)}")
        return
    video = fields.pop("video", None) if isinstance(fields, dict) else None
    try:
        rows.add(row_id, fields, None if video is None else resolve_beside(path, str(video)))
    except DataError as error:
        rows.bad.append(f"{row_id}: its video {error}")


def resolve_beside(path: str, target: str) -> str:
    """Resolve `target` relative to the folder that contains the file `path`; return absolute paths and S3 URIs unchanged.

    Raises:
        DataError: the target is outside the folder, or is a URL other than `s3://`.
    """
    if is_s3(target) or Path(target).is_absolute():
        return target
    address = mask_credentials(target)[:200]
    if "://" in target:
        raise DataError(f"{address} is a URL, but only local files and s3:// URIs are supported; download it")
    if not is_inside(Path("/folder", target), "/folder"):
        raise DataError(f"{address} is outside the folder of {path}; use its absolute path")
    if is_s3(path):
        return str(join_address(read_address(path).parent, target))
    return str(Path(path).expanduser().parent / target)
