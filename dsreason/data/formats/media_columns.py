"""Media in separate columns, and their place in the messages: at tags, in empty parts, or before the first question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
TAG = re.compile(
    r"\n?(?:<\|?(?P<kind>image|video)(?:[ _]?(?P<number>\d+))?\|?>|<(?P<name>img|vid)>(?P<file>[^<>\n]+)</(?P=name)>)\n?"
)
"""A tag in a text: `<image>`, `<image 2>`, `<|image_2|>` or `<img>a.png</img>`. A line break next to it belongs to the tag."""
NAMES: dict[str, MediaKind] = {"image": "image", "video": "video", "img": "image", "vid": "video"}
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".h264", ".hevc")


@dataclass
class RowMedia:
    """The media of a row's columns that no message shows yet, and the names of the columns that they come from."""

    waiting: dict[MediaKind, list[dict[str, Any]]]
    columns: set[str] = field(default_factory=set)
    labels: list[str] = field(default_factory=list)
    """Names of the cameras, one per media item, images first; empty if the columns have none."""

    def take(self, kind: MediaKind) -> dict[str, Any]:
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
            part = to_media_part(item, kind)
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


def to_media_part(item: Any, kind: MediaKind) -> dict[str, Any]:
    """Return an item of a column as a part; an item may be a part itself, such as `{"type": "image", "image": "a.png"}`."""
    if isinstance(item, dict) and not is_file(item):
        if kind not in item:
            raise DataError(
                f"an item of the column '{kind}s' must have the key {kind!r}, but has {', '.join(map(str, item))}"
            )
        return {**item, "type": kind}
    return {"type": kind, kind: item}


def split_column(value: Any, kind: MediaKind) -> tuple[list[Any], list[str]]:
    """Split a column into its media items and the names of their cameras."""
    if not value:
        return [], []
    if isinstance(value, dict) and not is_file(value) and kind not in value:
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
        messages = [fill_message(message, media, {}) for message in messages]  # tags that name their file
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
    numbered = {kind: list(parts) for kind, parts in media.waiting.items()}
    return [fill_message(message, media, numbered) for message in messages], media.columns


def check_shown(unused: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raise DataError if an unused column has media of a kind that no message shows."""
    kinds = {part["type"] for message in messages for part in list_parts(message)}
    for column, value in unused.items():
        for item in value if isinstance(value, list) else [value]:
            kind = guess_kind(item)
            if kind is not None and kind not in kinds:
                raise DataError(
                    f"the column {column!r} seems to have a media file, {item!r:.100}, but no message shows an item of its kind; "
                    f'set data.columns = {{{kind} = "{column}"}}, or remove the column'
                )


def guess_kind(value: Any) -> MediaKind | None:
    """Return the kind of media that a text names by its suffix or as a data URI; None if it names none."""
    if not isinstance(value, str) or len(value.split()) > 1:
        return None
    if value.startswith(("data:image/", "data:video/")):
        return NAMES[value[5:10]]
    suffix = PurePosixPath(value).suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None


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
    """Count the media that tags and parts without a file show, by kind; tags with the same number show the same item."""
    counts: dict[MediaKind, int] = dict.fromkeys(TOKEN_TYPES, 0)
    numbers: dict[MediaKind, set[int]] = {kind: set() for kind in TOKEN_TYPES}
    for message in messages:
        for part in list_parts(message):
            if is_empty(part):
                counts[part["type"]] += 1
        for tag in iter_tags(message):
            if tag["number"]:
                numbers[NAMES[tag["kind"]]].add(int(tag["number"]))
            elif tag["kind"]:
                counts[NAMES[tag["kind"]]] += 1
    for kind, shown in numbers.items():
        if shown and (counts[kind] or shown != set(range(1, len(shown) + 1))):
            raise DataError(f"the <{kind}> tags must either all have numbers, from 1 on, or none; got {sorted(shown)}")
        counts[kind] += len(shown)
    return counts


def iter_tags(message: Message) -> Iterator[re.Match[str]]:
    """Yield the tags in the text of a user or tool message. In other messages they are text."""
    if message["role"] in ("user", "tool"):
        for part in to_parts(message):
            if part["type"] == "text":
                yield from TAG.finditer(part["text"])


def to_parts(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def fill_message(message: Message, media: RowMedia, numbered: dict[MediaKind, list[dict[str, Any]]]) -> Message:
    """Replace the tags and the parts without a file by media; `numbered` has all media, for tags with a number."""
    if not any(is_empty(part) for part in list_parts(message)) and not any(iter_tags(message)):
        return message
    filled: list[dict[str, Any]] = []
    for part in to_parts(message):
        if is_empty(part):
            filled.append({**part, **media.take(part["type"])})
        elif part["type"] != "text" or message["role"] not in ("user", "tool"):
            filled.append(part)
        else:
            filled += split_at_tags(part["text"], media, numbered)
    return {**message, "content": filled}


def is_empty(part: Mapping[str, Any]) -> bool:
    return part["type"] in TOKEN_TYPES and part["type"] not in part


def split_at_tags(text: str, media: RowMedia, numbered: dict[MediaKind, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Split a text at its tags, and replace each tag with its media item."""
    parts: list[dict[str, Any]] = []
    start = 0
    for tag in TAG.finditer(text):
        parts.append({"type": "text", "text": text[start : tag.start()]})
        start = tag.end()
        kind = NAMES[tag["kind"] or tag["name"]]
        if tag["file"]:
            parts.append({"type": kind, kind: tag["file"]})
        else:
            parts.append(numbered[kind][int(tag["number"]) - 1] if tag["number"] else media.take(kind))
    parts.append({"type": "text", "text": text[start:]})
    return [part for part in parts if part.get("text") != ""]


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
