"""Media in separate columns: which files they have, with which settings, and whether the messages show all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from dsreason.data.formats.media_places import (
    NAMES,
    RowMedia,
    check_parts,
    check_replies,
    count_slots,
    fill_message,
    is_shown,
    label_parts,
    list_media,
    put_first,
    to_video_tags,
)
from dsreason.data.types import TOKEN_TYPES, MediaKind, Message
from dsreason.errors import DataError
from dsreason.media.files import IMAGE_SUFFIXES, is_image_content
from dsreason.media.frames import TIMES, to_number
from dsreason.media.vision import PART_SETTINGS

COLUMNS: dict[str, MediaKind] = {"image": "image", "images": "image", "video": "video", "videos": "video"}
"""Column → kind of media."""
SETTING_COLUMNS = ("video_start", "video_end", "nframes", "min_pixels", "max_pixels", "total_pixels")
"""Columns with a setting of the row's only video; those of `IMAGE_SETTINGS` may also be of its only image."""
IMAGE_SETTINGS = ("min_pixels", "max_pixels")
NAME_COLUMNS = ("cameras", "views")
"""Columns that may list the names of cameras."""
FILE_KEYS = ("bytes", "path", "url", "file_name", "src", "image_url", "video_url")
"""Keys of an object that has one media file."""
FRAME_TIMES = ("timestamp", "time")
"""Keys of a frame that has its own second."""
VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg"),
    *(".ts", ".3gp", ".ogv", ".wmv", ".flv", ".h264", ".hevc"),
)
VIDEO_MARKS = ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (8, b"AVI "), (0, b"FLV"), (0, b"\x00\x00\x01\xba"))
"""Position and bytes by which the content of a video is recognised."""


def collect_media(row: Mapping[str, Any]) -> RowMedia:
    """Collect the media of the row's columns as parts.

    A column has a file, a list of files, or an object with one file per camera. A video may also be a list of image files, a
    folder or a glob of them; the columns `fps` or `timestamps` then have its times. A file that both columns of a kind have,
    such as `image` and `images`, counts once.
    """
    media = RowMedia({kind: [] for kind in TOKEN_TYPES})
    for column, kind in find_columns(row).items():
        items, labels = split_column(parse_list(row.get(column)), kind)
        repeated = [] if column.endswith("s") else split_column(parse_list(row.get(f"{column}s")), kind)[0]
        for i, item in enumerate(items):
            media.columns.add(column)
            if item in repeated:
                continue
            label = labels[i] if labels else None
            media.labels += labels[i : i + 1]
            part = to_media_part(item, kind)
            if kind == "video":
                add_times(part, row, media, label)
            media.waiting[kind].append(part)
    num_media = sum(map(len, media.waiting.values()))
    if media.labels and len(media.labels) != num_media:
        raise DataError("some media have a camera name and others have none; name all of them, or use lists")
    for column in NAME_COLUMNS:
        names = parse_list(row.get(column))
        if is_name_list(names) and not media.labels and len(names) in (num_media, *map(len, media.waiting.values())):
            raise DataError(
                f"the column {column!r} lists names ({', '.join(names):.100}) beside a list of media; use an object with a name "
                f'for each, such as {{"images": {{"{names[0]}": "a.png"}}}}'
            )
    return media


def parse_list(value: Any) -> Any:
    """Parse the JSON text of a list or an object, as CSV files have it; return other values unchanged."""
    if not isinstance(value, str) or (value[:1], value[-1:]) not in (("[", "]"), ("{", "}")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # a path such as "[1]/[2]"


def is_name_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(name, str) and not guess_kind(name) for name in value)
    )


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
    if isinstance(value, dict) and find_file_key(value, kind) is None and not value.keys() <= {"bytes", "path"}:
        cameras = {name: item for name, item in value.items() if item}
        return list(cameras.values()), list(cameras)
    if not isinstance(value, list):
        return [value], []
    items = [item for item in value if item]
    return ([items] if kind == "video" and is_frame_list(items) else items), []


def find_file_key(item: Mapping[str, Any], kind: MediaKind) -> str | None:
    """Return the key under which an object has its file, or the frames of its video; None if it has no such key."""
    keys = (kind, *(("frames",) if kind == "video" else ()), *FILE_KEYS)
    return next((key for key in keys if item.get(key)), None)


def to_media_part(item: Any, kind: MediaKind) -> dict[str, Any]:
    """Return an item of a column as a part; an item may be a part itself, such as `{"type": "image", "image": "a.png"}`."""
    if isinstance(item, list) and kind == "video":
        return read_frames(item)
    if not isinstance(item, dict):
        return {"type": kind, kind: item}
    key = find_file_key(item, kind)
    if key is None:
        raise DataError(
            f"an item of the column '{kind}s' must have the key {kind!r}, but has {', '.join(map(str, item))}; "
            f"{', '.join(FILE_KEYS)} are read as well"
        )
    names = (
        item.keys() if key == kind else item.keys() & (PART_SETTINGS | {*TIMES})
    )  # not the width of a file, for example
    settings = {name: item[name] for name in names if item[name] is not None}
    file = get_file(item, key)
    return {**settings, **(read_frames(file) if isinstance(file, list) else {kind: file}), "type": kind}


def get_file(item: Mapping[str, Any], key: str) -> Any:
    """Return the file under a key of an object: a path or URL, or `{"bytes": …, "path": …}`."""
    if key in ("bytes", "path"):
        return {name: item[name] for name in ("bytes", "path") if name in item} if "bytes" in item else item[key]
    file = item[key]
    inner = next((name for name in FILE_KEYS if file.get(name)), None) if isinstance(file, dict) else None
    return file if inner is None else get_file(file, inner)


def read_frames(frames: list[Any]) -> dict[str, Any]:
    """Return the frames of a video as a part, with their seconds if each frame has its own `timestamp` or `time`."""
    files = [to_media_part(frame, "image")["image"] for frame in frames]
    seconds = [find_second(frame) for frame in frames]
    if all(second is None for second in seconds):
        return {"type": "video", "video": files}
    if None in seconds:
        raise DataError(f"the frame {seconds.index(None)} of a video has no timestamp, but others have one; add it")
    return {"type": "video", "video": files, "timestamps": seconds}


def find_second(frame: Any) -> Any:
    return (
        next((frame[key] for key in FRAME_TIMES if frame.get(key) is not None), None)
        if isinstance(frame, dict)
        else None
    )


def add_times(part: dict[str, Any], row: Mapping[str, Any], media: RowMedia, camera: str | None) -> None:
    """Add the times of the columns `fps` and `timestamps` to a video that is given as frames and has none."""
    times = {name: parse_list(row[name]) for name in TIMES if row.get(name) is not None}
    number = len(media.waiting["video"])
    if has_frames(part["video"]):
        if not part.keys() & {*TIMES}:
            media.columns |= times.keys()
            part |= {name: pick(value, number, name, camera) for name, value in times.items()}
    elif is_per_video(times.get("timestamps"), "timestamps") and pick(
        times["timestamps"], number, "timestamps", camera
    ):
        raise DataError(f"video {number + 1} has timestamps, but is not given as frames; set its entry to null")


def is_frame_list(items: Sequence[Any]) -> bool:
    """Return whether all items are images, so that they are the frames of one video."""
    return bool(items) and all(guess_kind(item) == "image" and "*" not in str(item)[:1000] for item in items)


def has_frames(item: Any) -> bool:
    """Return whether a video is given as frames: a list of files, a folder, or a glob."""
    if isinstance(item, list):
        return True
    if not isinstance(item, str) or item.startswith(("data:", "http:", "https:")):
        return False
    suffix = PurePosixPath(item).suffix.lower()
    return suffix not in VIDEO_SUFFIXES and (suffix not in IMAGE_SUFFIXES or any(mark in item for mark in "*?["))


def is_per_video(value: Any, name: str) -> bool:
    """Return whether a column of times has an entry per video: by camera, or in a list."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and (name == "fps" or any(item is None or isinstance(item, list) for item in value))


def pick(value: Any, number: int, name: str, camera: str | None = None) -> Any:
    """Return the times of one video: `value`, or its entry if it has one per video."""
    if not is_per_video(value, name):
        return value
    if isinstance(value, dict):
        if camera not in value:
            raise DataError(
                f"field {name!r} has times for {', '.join(value)}, but none for {camera or 'an unnamed video'}"
            )
        return value[camera]
    if number >= len(value):
        raise DataError(
            f"field {name!r} has {len(value)} entries, but the row has more videos; add one entry per video"
        )
    return value[number]


# ---------------------------------------------------------------- placing


def place_media(messages: list[Message], row: Mapping[str, Any]) -> tuple[list[Message], set[str]]:
    """Put the media of the row's columns into the messages, and return the messages and the columns used.

    Each tag in the text of a system, user or tool message, and each media part without a file, takes the next item of its kind.
    If there is neither, all media come before the first text of the user.

    Raises:
        DataError: the numbers of tags and media differ, or a column's setting fits no media item.
    """
    media = collect_media(row)
    check_parts(messages)
    if any(media.waiting.values()) or list_media(messages):
        check_replies(messages)
    messages = insert_media(messages, media)
    if shown := list_media(messages):
        media.columns |= apply_settings(shown, row, media.columns)
    return messages, media.columns


def insert_media(messages: list[Message], media: RowMedia) -> list[Message]:
    num_media = {kind: len(items) for kind, items in media.waiting.items()}
    if not any(num_media.values()):
        media.has_system_tags = False  # they are text, as there is nothing to show
    num_slots = count_slots(messages, media)
    if num_media["image"] == num_slots["video"] == 0 < num_media["video"] == num_slots["image"]:
        messages = [to_video_tags(message) for message in messages]  # LLaVA-NeXT writes <image> for videos
        num_slots = count_slots(messages, media)
    if not any(num_slots.values()):
        messages = [fill_message(message, media, {}) for message in messages]  # tags that name their file
        return messages if is_shown(messages, media) else put_first(messages, label_parts(media))
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
    return [fill_message(message, media, numbered) for message in messages]


def apply_settings(parts: list[dict[str, Any]], row: Mapping[str, Any], used: set[str]) -> set[str]:
    """Add the settings in the row's columns to its only video or image, and return the columns.

    Raises:
        DataError: the row has several media that a setting may be for, or none, or the item has another value.
    """
    if row.get("timestamps") is not None and "timestamps" not in used:
        raise DataError(
            "the column 'timestamps' is for a video given as frames without own times, which the row lacks; remove it"
        )
    columns = {column for column in SETTING_COLUMNS if row.get(column) not in (None, "")}
    videos = [part for part in parts if part["type"] == "video"]
    for column in sorted(columns):
        targets = parts if column in IMAGE_SETTINGS else videos
        if len(targets) != 1:
            raise DataError(
                f"the column {column!r} applies to a row with exactly one video"
                + (" or image" if column in IMAGE_SETTINGS else "")
                + f", but this row has {len(videos)} videos and {len(parts) - len(videos)} images; put {column!r} into the parts"
            )
        value = to_number(row[column])
        if targets[0].get(column, value) != value:
            raise DataError(f"the column {column!r} is {value!r:.100}, but the part has {targets[0][column]!r:.100}")
        targets[0][column] = value
    return columns


# ---------------------------------------------------------------- media that no message shows


def check_shown(unused: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raise DataError if an unused column has a media file that no message shows."""
    shown = [name for part in list_media(messages) for name in iter_names(part[part["type"]])]
    for column, value in unused.items():
        for item, kind in iter_files(value):
            if any(is_same_file(name, other) for name in iter_names(item) for other in shown):
                continue
            text = (
                item
                if isinstance(item, str)
                else next((name for name in iter_names(item) if isinstance(name, str)), "bytes")
            )
            raise DataError(
                f"the column {column!r} seems to have a media file, {text!r:.100}, but no message shows it; set data.columns = "
                f'{{{kind} = "{column}"}}, put all files into one column, or remove the column'
            )


def iter_files(value: Any) -> Iterator[tuple[Any, MediaKind]]:
    """Yield the media files in a value, also in its objects and lists, with their kinds."""
    if kind := guess_kind(value):
        yield value, kind
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from iter_files(inner)


def iter_names(file: Any) -> Iterator[str | bytes]:
    """Yield the paths and contents that identify a file, or the files of a list."""
    if isinstance(file, str | bytes):
        yield file
    elif isinstance(file, dict | list):
        for inner in (file.get(key) for key in FILE_KEYS) if isinstance(file, dict) else file:
            yield from iter_names(inner)


def is_same_file(one: str | bytes, other: str | bytes) -> bool:
    """Return whether two names are equal, or one path ends with the other."""
    if isinstance(one, str) and isinstance(other, str):
        return f"/{one}".endswith(f"/{other}") or f"/{other}".endswith(f"/{one}")
    return one == other


def guess_kind(value: Any) -> MediaKind | None:
    """Return the kind of media that a text names by its suffix or as a data URI, or that an object's or bytes' content has.

    An object of bytes and path whose content is unknown counts as an image. Return None for other values.
    """
    if isinstance(value, bytes):
        if any(value[start : start + len(mark)] == mark for start, mark in VIDEO_MARKS):
            return "video"
        return "image" if is_image_content(value) else None
    if isinstance(value, dict):
        kind = next((kind for key in FILE_KEYS if (kind := guess_kind(value.get(key)))), None)
        return kind or ("image" if isinstance(value.get("bytes"), bytes) else None)
    if not isinstance(value, str) or len(value.split()) > 1:
        return None
    if value.startswith(("data:image/", "data:video/")):
        return NAMES[value[5:10]]
    suffix = PurePosixPath(value).suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None
