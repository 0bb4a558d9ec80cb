"""Adapter for folders with `meta.json`, one conversation per file in `text/`, and its image or video in `media/` (Cosmos 3).

    {"id": "7", "media": "media/video_7.mp4", "conversation": "text/conversation_7.json"}

A conversation file contains an object with the list `conversations`. In its media parts, such as
`{"type": "video", "video": "video_0"}`, the value is a key that stands for the row's medium. If the row has several media, the
keys stand for them in the order of their numbers; `media` may also map keys to files. Parts without a value show the next medium.

`data.path` is the folder or its `meta.json`. With the adapter `auto`, rows of other files may have the same columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.read import read_row
from dsreason.data.rows import only_train, read_rows
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.own_files import is_inside
from dsreason.files.remote import fetch_file, join_address, read_address
from dsreason.problems import describe_missing_file, describe_parse_error

LIST = "meta.json"
LISTS = ("conversations", "messages")
NUMBER = re.compile(r".*?(\d+)")
"""Pattern of a media key: a name and a number."""


def rows(data: SourceConfig) -> Sequence[Any]:
    """Read the rows of `meta.json`, or of another file that `data.path` names."""
    if is_s3(data.path):
        path = data.path if data.path.endswith(".json") else f"{data.path.rstrip('/')}/{LIST}"
        return read_rows(data.model_copy(update={"path": path}))
    folder = Path(data.path).expanduser()
    if not folder.is_dir():
        return read_rows(data)
    only_train(data, f"{folder}: a folder with {LIST}")
    if not (folder / LIST).is_file():
        raise DataError(
            f"{folder / LIST} {describe_missing_file(folder / LIST)}, but the adapter conversation_files reads its rows; "
            "correct data.path"
        )
    return read_rows(data.model_copy(update={"path": str(folder / LIST)}))


def to_sample(row: Any, data: SourceConfig) -> Sample:
    if not isinstance(row, dict) or not isinstance(row.get("conversation"), str):
        raise DataError("the row must be an object with a field 'conversation', the path of a JSON file")
    return read_row(insert_conversation(row, data.path))


def insert_conversation(row: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the row with the conversation from its file, in which the row's media replace the keys that stand for them.

    Args:
        path: the folder to which the file's path is relative, or a file in this folder.
    """
    name = row["conversation"]
    document = read_document(name, path)
    column = next((column for column in LISTS if isinstance(document.get(column), list)), None)
    if column is None:
        raise DataError(
            f"{name}: must have a list of messages in 'conversations'; it has {', '.join(document) or 'nothing'}"
        )
    parts = [
        part
        for turn in document[column]
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        for part in turn["content"]
        if isinstance(part, dict) and part.get("type") in ("image", "video")
    ]
    insert_media(parts, row.get("media"), name)
    others = {key: value for key, value in row.items() if key not in ("media", "conversation")}
    for key in sorted(document.keys() & others.keys()):
        if document[key] != others[key]:
            raise DataError(f"{name}: its field {key!r} is {document[key]!r:.80}, but the row has {others[key]!r:.80}")
    return {**others, **document}


def read_document(name: str, path: str) -> dict[str, Any]:
    if is_s3(path):
        address = read_address(path)
        file = fetch_file(str(join_address(address.parent if path.endswith(".json") else address, name)))
    else:
        folder = Path(path).expanduser()
        folder = folder if folder.is_dir() else folder.parent
        file = folder / name
        if not is_inside(file, folder):
            raise DataError(f"field 'conversation': {name} points outside {folder}; use a path inside the folder")
    try:
        document = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"field 'conversation': {file} is not valid JSON ({describe_parse_error(error)})") from error
    except OSError as error:
        raise DataError(f"field 'conversation': {file} cannot be read: {error.strerror}") from error
    if not isinstance(document, dict):
        raise DataError(f"field 'conversation': {file} must contain an object; got {type(document).__name__}")
    return document


def insert_media(parts: list[dict[str, Any]], media: Any, name: str) -> None:
    """Insert the row's media into the media parts of the conversation `name`, by key or, for parts without a key, in order."""
    keys = [part[part["type"]] if isinstance(part.get(part["type"]), str) else None for part in parts]
    distinct = [key for key in dict.fromkeys(keys) if key is not None]
    if isinstance(media, dict):
        if unknown := [key for key in distinct if key not in media] or [key for key in media if key not in distinct]:
            raise DataError(
                f"{name}: shows the media {', '.join(distinct) or 'none'}, but the row's field 'media' has "
                f"{', '.join(map(str, media))}; correct {unknown[0]}"
            )
        file_by_key = media
        unnamed: list[Any] = []
    else:
        files = media if isinstance(media, list) else [] if media is None else [media]
        slots = len(distinct) + keys.count(None)
        if slots != len(files):
            raise DataError(f"{name}: shows {slots} media, but the row's field 'media' has {len(files)}")
        file_by_key = dict(zip(sort_keys(distinct), files[: len(distinct)], strict=True))
        unnamed = files[len(distinct) :]
    for part, key in zip(parts, keys, strict=True):
        part[part["type"]] = unnamed.pop(0) if key is None else file_by_key[key]


def sort_keys(keys: list[str]) -> list[str]:
    """Sort keys such as `video_0` by their numbers; keep the order if some key has no number, or two have the same."""
    numbers = {int(match[1]): key for key in keys if (match := NUMBER.fullmatch(key))}
    return [numbers[number] for number in sorted(numbers)] if len(numbers) == len(keys) else keys
