"""Prompts in a file: a line each, or a JSON object a line with `prompt`, further fields for rewards and perhaps a `video`."""

from __future__ import annotations

import json
from pathlib import Path

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.remote import join_address, local_copy, read_address
from dsreason.world.data.rows import Rows


def read_prompts(path: str) -> Rows:
    """The rows of a text file, or of JSONL where the name ends with `.jsonl`; empty lines are left out.

    A `video` is a path from the file's folder on, or an `s3://` address.

    Raises:
        DataError: no such file, or it is not UTF-8.
    """
    if not path:
        raise DataError('data.path is empty; name a text file with a prompt a line, or JSONL with "prompt"')
    file = local_copy(path) if is_s3(path) else Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"data.path: {path}: no such file")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text: {error}") from None
    found = Rows()
    for number, line in enumerate(lines, 1):
        if line.strip() and file.suffix == ".jsonl":
            _add_object(found, path, f"{path}:{number}", line)
        elif line.strip():
            found.add(f"{path}:{number}", {"prompt": line}, None)
    return found


def _add_object(found: Rows, path: str, row_id: str, line: str) -> None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        found.bad.append(f"{row_id}: is not JSON: {error}")
        return
    video = fields.pop("video", None) if isinstance(fields, dict) else None
    try:
        found.add(row_id, fields, None if video is None else beside(path, str(video)))
    except DataError:
        found.bad.append(
            f"{row_id}: its video {str(video):.200} is not below the folder of {path}; give its whole address"
        )


def beside(path: str, relative: str) -> str:
    """A path from the folder of `path` on; absolute ones and addresses stay. DataError where it leads out of a folder in S3."""
    if is_s3(relative) or Path(relative).is_absolute():
        return relative
    if is_s3(path):
        return str(join_address(read_address(path).parent, relative))
    return str(Path(path).expanduser().parent / relative)
