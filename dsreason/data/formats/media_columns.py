"""Media in separate columns, and their place in the messages: at tags, in empty parts, or before the first question."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from dsreason.data.types import TOKEN_TYPES, MediaKind, Message
from dsreason.errors import DataError
from dsreason.media.files import IMAGE_SUFFIXES

COLUMNS: dict[str, MediaKind] = {"image": "image", "images": "image", "video": "video", "videos": "video"}
"""Column → kind of media."""
TIME_COLUMNS = ("fps", "timestamps")
"""Columns with the frame rate, or the seconds, of videos that are given as frames."""
TAG = re.compile(r"\n?<(image|video)>\n?")
"""A tag in a text; a line break next to it belongs to the tag."""
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".h264", ".hevc")


@dataclass
class RowMedia:
    """The media of a row's columns that no message shows yet, and the names of the columns that they come from."""

    waiting: dict[MediaKind, list[dict[str, Any]]]
    columns: set[str] = field(default_factory=set)
    labels: list[str] = field(default_factory=list)
    """Names of the cameras, one per media item, images first; empty if the columns have none."""

    def take(self, kind: MediaKind) -> dict[str, Any]:
        if not self.waiting[kind]:
            raise DataError(
                f"the messages show more {kind}s than the row has; add one to the column '{kind}s', or remove the <{kind}> tag "
                f"or the part of type {kind}"
            )
        return self.waiting[kind].pop(0)


def collect_media(row: Mapping[str, Any]) -> RowMedia:
    """Collect the media of the row's columns as parts.

    A column has a file, a list of files, or an object with one file per camera. A video may also be a list of image files, a
    folder or a glob of them; the columns `fps` or `timestamps` then have its times.
    """
    media = RowMedia({kind: [] for kind in TOKEN_TYPES})
    for column, kind in find_columns(row).items():
        items, labels = split_column(row.get(column), kind)
        if not items:
            continue
        media.columns.add(column)
        media.labels += labels
        for item in items:
            part: dict[str, Any] = {"type": kind, kind: item}
            if kind == "video" and has_frames(item):
                times = {name: row[name] for name in TIME_COLUMNS if row.get(name) is not None}
                media.columns |= times.keys()
                part |= {name: pick(times[name], len(media.waiting[kind]), name) for name in times}
            media.waiting[kind].append(part)
    if media.labels and len(media.labels) != sum(map(len, media.waiting.values())):
        raise DataError("some media have a camera name and others have none; name all of them, or use lists")
    return media


def find_columns(row: Mapping[str, Any]) -> dict[str, MediaKind]:
    """Return the row's media columns by kind. `file_name`, of folders with a metadata file, counts only if there is no other."""
    columns = {column: kind for column, kind in COLUMNS.items() if row.get(column)}
    name = row.get("file_name")
    if not columns and isinstance(name, str) and name.lower().endswith(IMAGE_SUFFIXES + VIDEO_SUFFIXES):
        return {"file_name": "image" if name.lower().endswith(IMAGE_SUFFIXES) else "video"}
    return columns


def split_column(value: Any, kind: MediaKind) -> tuple[list[Any], list[str]]:
    """Split a column into its media items and the names of their cameras."""
    if not value:
        return [], []
    if isinstance(value, dict) and not is_file(value):
        cameras = {name: item for name, item in value.items() if item}
        return list(cameras.values()), list(cameras)
    if not isinstance(value, list):
        return [value], []
    items = [item for item in value if item]
    return ([items] if kind == "video" and is_frame_list(items) else items), []


def is_file(value: Mapping[str, Any]) -> bool:
    """Return whether a value is a Hugging Face image or video: its bytes, its path, or both."""
    return value.keys() <= {"bytes", "path"}


def is_frame_list(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, str) and item.lower().endswith(IMAGE_SUFFIXES) for item in items)


def has_frames(item: Any) -> bool:
    """Return whether a video is given as frames: a list of files, a folder, or a glob."""
    if isinstance(item, list):
        return True
    if not isinstance(item, str) or item.startswith(("data:", "http:", "https:")):
        return False
    suffix = PurePosixPath(item).suffix.lower()
    return suffix not in VIDEO_SUFFIXES and (not suffix or any(mark in item for mark in "*?["))


def pick(value: Any, number: int, name: str) -> Any:
    """Return the times of one video: `value`, or its item if it has one per video."""
    per_video = isinstance(value, list) and (name == "fps" or (bool(value) and isinstance(value[0], list)))
    if not per_video:
        return value
    if number >= len(value):
        raise DataError(
            f"field {name!r} has {len(value)} entries, but the row has more videos; add one entry per video"
        )
    return value[number]


# ---------------------------------------------------------------- placing


def place_media(messages: list[Message], row: Mapping[str, Any]) -> tuple[list[Message], set[str]]:
    """Put the media of the row's columns into the messages, and return the messages and the columns used.

    Each tag in the text of a user or tool message, and each media part without a file, takes the next item of its kind. If there
    is neither, all media come before the first text of the user.

    Raises:
        DataError: the numbers of tags and media differ.
    """
    media = collect_media(row)
    num_media = {kind: len(items) for kind, items in media.waiting.items()}
    num_slots = count_slots(messages)
    if not any(num_slots.values()):
        if is_shown(messages, media):
            return messages, media.columns
        return put_first(messages, label_parts(media)), media.columns
    if media.labels:
        raise DataError(
            f"the row has both <image> or <video> tags and camera names ({', '.join(media.labels)}); remove the tags, or put the "
            "media into lists"
        )
    for kind, count in num_media.items():
        if num_slots[kind] != count:
            raise DataError(
                f"the messages have {num_slots[kind]} <{kind}> tags or empty parts, but the row has {count} {kind}s; use one tag "
                f"per {kind}, or no tag at all to show all media first"
            )
    return [fill_message(message, media) for message in messages], media.columns


def is_shown(messages: Sequence[Message], media: RowMedia) -> bool:
    """Return whether the messages already name the files of the columns, which then only repeat them.

    Raises:
        DataError: the messages name other files.
    """
    shown = [part for message in messages for part in list_parts(message) if part.get("type") in TOKEN_TYPES]
    if not shown:
        return False
    files = [part[part["type"]] for part in shown]
    repeated = [part[kind] for kind, parts in media.waiting.items() for part in parts]
    if unshown := [item for item in repeated if item not in files]:
        raise DataError(
            f"the messages name their media, but not all media of the columns {', '.join(sorted(media.columns))}, such as "
            f"{unshown[0]!r:.200}; add a part for each, or remove the columns"
        )
    return True


def list_parts(message: Message) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def count_slots(messages: Sequence[Message]) -> dict[MediaKind, int]:
    """Count the tags and the media parts without a file, by kind."""
    counts: dict[MediaKind, int] = dict.fromkeys(TOKEN_TYPES, 0)
    for message in messages:
        for part in to_parts(message) if message["role"] in ("user", "tool") else list_parts(message):
            kind = part["type"]
            if kind != "text":
                counts[kind] += kind not in part
            elif message["role"] in ("user", "tool"):
                for tag in TAG.findall(part["text"]):
                    counts[tag] += 1
    return counts


def to_parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def fill_message(message: Message, media: RowMedia) -> Message:
    if message["role"] not in ("user", "tool"):
        parts = [media.take(part["type"]) if is_empty(part) else part for part in list_parts(message)]
        return {**message, "content": parts} if parts else message
    parts = [piece for part in to_parts(message) for piece in split_at_tags(part, media)]
    if isinstance(message["content"], str) and all(part["type"] == "text" for part in parts):
        return message
    return {**message, "content": parts}


def is_empty(part: Mapping[str, Any]) -> bool:
    return part["type"] in TOKEN_TYPES and part["type"] not in part


def split_at_tags(part: dict[str, Any], media: RowMedia) -> list[dict[str, Any]]:
    """Split a text part at its tags, and replace each tag with the next media item."""
    if is_empty(part):
        return [{**part, **media.take(part["type"])}]
    if part["type"] != "text" or not TAG.search(part["text"]):
        return [part]
    pieces = TAG.split(part["text"])  # text, kind, text, kind, …, text
    parts = [media.take(piece) if i % 2 else {"type": "text", "text": piece} for i, piece in enumerate(pieces)]  # type: ignore[arg-type]
    return [piece for piece in parts if piece.get("text") != ""]


def label_parts(media: RowMedia) -> list[dict[str, Any]]:
    """Return the media as parts, each after the name of its camera, if the columns have names."""
    parts = [part for kind in TOKEN_TYPES for part in media.waiting[kind]]
    if not media.labels:
        return parts
    labelled: list[dict[str, Any]] = []
    for label, part in zip(media.labels, parts, strict=True):
        labelled += [{"type": "text", "text": f"{label}: "}, part, {"type": "text", "text": "\n"}]
    return labelled


def put_first(messages: list[Message], media: list[dict[str, Any]]) -> list[Message]:
    """Insert the media before the text of the first user message."""
    if not media:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise DataError("the row has media, but no user message that could show them; add one")
    parts = [part for part in to_parts(messages[first]) if part.get("text") != ""]
    return [*messages[:first], {**messages[first], "content": [*media, *parts]}, *messages[first + 1 :]]
