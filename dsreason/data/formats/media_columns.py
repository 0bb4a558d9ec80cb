"""Media in separate columns: their files, their settings, and a check that the messages use every file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsreason.data.formats.cameras import add_names, find_label
from dsreason.data.formats.media_items import (
    FILE_KEYS,
    VIDEO_SUFFIXES,
    find_file_key,
    has_frames,
    has_no_file,
    is_frame_list,
    is_same_file,
    iter_files,
    iter_names,
    to_media_part,
)
from dsreason.data.formats.media_places import (
    RowMedia,
    check_parts,
    check_placeholders,
    check_replies,
    count_slots,
    describe_tags,
    fill_message,
    is_repeated,
    label_parts,
    list_media,
    list_parts,
    put_first,
    to_video_tags,
)
from dsreason.data.formats.media_settings import apply_settings, parse_list
from dsreason.data.types import TOKEN_TYPES, MediaKind, Message
from dsreason.errors import DataError
from dsreason.media.embedded import is_embedded
from dsreason.media.files import IMAGE_SUFFIXES
from dsreason.media.frames import TIMES, to_number

COLUMNS: dict[str, MediaKind] = {"image": "image", "images": "image", "video": "video", "videos": "video"}
"""Column → media kind."""
NUMBERED = re.compile("(image|video)_?([0-9]+)")
"""Pattern for columns that contain one media item each, such as MMMU's image_1 to image_7."""


def collect_media(row: Mapping[str, Any]) -> RowMedia:
    """Collect the media in the row's columns as message parts.

    A column contains a file, a list of files, or an object with one file per camera. A video may also be given as image files
    (a list, a folder or a glob); the column `fps` or `timestamps` then contains the frame times. A file that is in both the
    singular and the plural column, such as `image` and `images`, counts once.
    """
    media = RowMedia({kind: [] for kind in TOKEN_TYPES})
    for column, kind in find_columns(row).items():
        media.columns.add(column)
        items, labels = split_column(parse_list(row.get(column)), kind)
        repeated = [] if column.endswith("s") else split_column(parse_list(row.get(f"{column}s")), kind)[0]
        for i, item in enumerate(items):
            if item in repeated:
                continue
            label = find_label(item, labels[i] if labels else None)
            media.labels += [] if label is None else [label]
            part = to_media_part(item, kind)
            if kind == "video":
                add_times(part, row, media, label)
            media.waiting[kind].append(part)
    check_times(row, media)
    add_names(row, media)
    return media


def find_columns(row: Mapping[str, Any]) -> dict[str, MediaKind]:
    """Return the row's media columns and their kinds. `file_name`, from a folder's metadata file, is used only as a fallback."""
    columns = {column: kind for column, kind in COLUMNS.items() if row.get(column)}
    for kind in TOKEN_TYPES:
        if has_no_file([row.get(kind), row.get(f"{kind}s")]):
            columns |= dict.fromkeys(find_numbered(row, kind), kind)
    name = row.get("file_name")
    if not columns and isinstance(name, str) and name.lower().endswith(IMAGE_SUFFIXES + VIDEO_SUFFIXES):
        return {"file_name": "image" if name.lower().endswith(IMAGE_SUFFIXES) else "video"}
    return columns


def find_numbered(row: Mapping[str, Any], kind: MediaKind) -> list[str]:
    """Return the numbered columns that contain a media item, such as `image_1`, in numerical order.

    Raises:
        DataError: the numbers do not start at 0 or 1, or have a gap.
    """
    matches = {column: match for column in row if (match := NUMBERED.fullmatch(str(column))) and match[1] == kind}
    columns = {int(match[2]): column for column, match in matches.items() if not has_no_file(row[column])}
    numbers = sorted(columns)
    if numbers and (numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers)))):
        raise DataError(
            f"the columns {', '.join(columns[number] for number in numbers)} must be numbered from 0 or 1 on without a gap; "
            f"rename them, or put their files into a list in the column '{kind}s'"
        )
    return [columns[number] for number in numbers]


def split_column(value: Any, kind: MediaKind) -> tuple[list[Any], list[str]]:
    """Split a column into its media items and their camera names."""
    if has_no_file(value):
        return [], []
    if isinstance(value, dict) and find_file_key(value, kind) is None and not value.keys() & {*FILE_KEYS}:
        cameras = {name: item for name, item in value.items() if not has_no_file(item)}
        return list(cameras.values()), list(cameras)
    if not isinstance(value, list):
        return [value], []
    items = [item for item in value if not has_no_file(item)]
    return ([items] if kind == "video" and is_frame_list(items) else items), []


def add_times(part: dict[str, Any], row: Mapping[str, Any], media: RowMedia, camera: str | None) -> None:
    """Add the row's `fps` and `timestamps` columns to a video that has neither key.

    Only a video given as frames may have timestamps. For a video file, `fps` is the rate at which frames are sampled.
    """
    times = {name: parse_list(row[name]) for name in TIMES if row.get(name) not in (None, "")}
    is_frames = has_frames(part["video"])
    if is_frames and not times and row.get("sample_fps") is not None:
        media.columns.add("sample_fps")
        times = {"fps": parse_list(row["sample_fps"])}  # the name in qwen-vl-utils
    number = len(media.waiting["video"])
    seconds = None if is_frames else times.pop("timestamps", None)
    if is_per_video(seconds, "timestamps") and pick(seconds, number, "timestamps", camera):
        raise DataError(f"video {number + 1} has timestamps, but is not given as frames; set its entry to null")
    if part.keys() & {*TIMES}:
        return
    for name, value in times.items():
        media.columns.add(name)
        if (own := pick(value, number, name, camera)) is not None:
            part[name] = to_number(own)


def check_times(row: Mapping[str, Any], media: RowMedia) -> None:
    """Raise DataError if a list of times does not have one entry per video, because the assignment would be ambiguous."""
    num_videos = len(media.waiting["video"])
    for name in TIMES:
        value = parse_list(row.get(name))
        if num_videos and isinstance(value, list) and is_per_video(value, name) and len(value) != num_videos:
            raise DataError(
                f"field {name!r} has {len(value)} entries, but the row has {num_videos} videos; add one entry per video"
            )


def is_per_video(value: Any, name: str) -> bool:
    """Return whether a column of times has one entry per video, in an object by camera or in a list."""
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and (name == "fps" or any(item is None or isinstance(item, list) for item in value))


def pick(value: Any, number: int, name: str, camera: str | None = None) -> Any:
    """Return the times for one video: the video's entry if `value` has one entry per video, otherwise `value` itself."""
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
    """Insert the media from the row's columns into the messages; return the new messages and the columns used.

    Each tag in a system, user or tool message, and each media part without a file, is replaced with the next media item of its
    kind. If the row has neither tags nor empty parts, all media are inserted before the user's first text.

    Raises:
        DataError: the number of tags differs from the number of media, or a column's setting applies to no media item.
    """
    media = collect_media(row)
    messages = [read_objects(message) for message in messages]
    check_parts(messages)
    if any(media.waiting.values()) or list_media(messages):
        check_replies(messages)
    messages = insert_media(messages, media)
    if parts := list_media(messages):
        media.columns |= apply_settings(parts, row, media.columns)
    return messages, media.columns


def read_objects(message: Message) -> Message:
    """Convert media parts whose file is an object or a list of frames, like media in columns."""
    parts = []
    for part in list_parts(message):
        file = part.get(part["type"])
        if part["type"] in TOKEN_TYPES and isinstance(file, dict | list) and not has_no_file(file):
            if label := find_label(file, None):
                raise DataError(f"a part has the name of a camera, {label!r:.100}, in its file; put it into the text")
            part = {**to_media_part(file, part["type"]), **{key: part[key] for key in part if key != part["type"]}}
        parts.append(part)
    return {**message, "content": parts} if parts else message


def insert_media(messages: list[Message], media: RowMedia) -> list[Message]:
    num_media = {kind: len(items) for kind, items in media.waiting.items()}
    if not any(num_media.values()):
        media.has_system_tags = False  # without media, the tags are ordinary text
    num_slots = count_slots(messages, media)
    if num_media["image"] == num_slots["video"] == 0 < num_media["video"] == num_slots["image"]:
        messages = [to_video_tags(message) for message in messages]  # LLaVA-NeXT writes <image> for videos
        num_slots = count_slots(messages, media)
    if not any(num_slots.values()):
        messages = [fill_message(message, media, {}) for message in messages]  # tags that contain their file's name
        if is_repeated(messages, media):
            return messages
        if any(num_media.values()):
            check_placeholders(messages)
        return put_first(messages, label_parts(media))
    if media.labels:
        raise DataError(
            f"the row has both <image> or <video> tags and camera names ({', '.join(media.labels)}); remove the tags, or put the "
            "media into lists"
        )
    for kind, count in num_media.items():
        if num_slots[kind] != count:
            raise DataError(
                f"the messages have {num_slots[kind]} <{kind}> tags or empty parts, but the row has {count} {kind}s; "
                + describe_tags(kind, count)
            )
    numbered = {kind: list(parts) for kind, parts in media.waiting.items()}
    return [fill_message(message, media, numbered) for message in messages]


# ---------------------------------------------------------------- media that no message uses


def check_rejected(row: Mapping[str, Any]) -> None:
    """Raise DataError if the rejected reply of a preference has different media than the chosen one."""
    for kind in TOKEN_TYPES:
        column = f"rejected_{kind}s"
        rejected_media = split_column(parse_list(row.get(column)), kind)[0]
        if rejected_media and rejected_media != [
            item for name in (kind, f"{kind}s") for item in split_column(parse_list(row.get(name)), kind)[0]
        ]:
            raise DataError(f"field {column!r}: both replies of a preference must have the same {kind}s")


def check_no_unused_media(unused: Mapping[str, Any], messages: Sequence[Message]) -> None:
    """Raise DataError if an unused column contains a media file that no message uses."""
    used_names = [name for part in list_media(messages) for name in iter_names(part[part["type"]])]
    for column, value in unused.items():
        for item, kind in iter_files(value):
            if any(is_same_file(name, other) for name in iter_names(item) for other in used_names):
                continue
            text = next((name for name in iter_names(item) if isinstance(name, str) and not is_embedded(name)), "bytes")
            raise DataError(
                f"the column {column!r} seems to have a media file, {text!r:.100}, but no message uses it; "
                f"{suggest_column(column, value, kind, unused, used_names)}, or remove the column"
            )


def suggest_column(
    column: str, value: Any, kind: MediaKind, row: Mapping[str, Any], used_names: Sequence[str | bytes]
) -> str:
    """Suggest how to include a file from an unused column.

    Suggest data.columns only if `used_names` is empty, because a renamed column would replace the column of those files.
    """
    value = parse_list(value)
    if isinstance(value, list) and is_frame_list(value) and (column == "frames" or row.keys() & {*TIMES, "sample_fps"}):
        kind = "video"
    try:
        media = collect_media({kind: value})
        is_readable = bool(media.waiting[kind]) and set(media.labels).isdisjoint(COLUMNS) and not used_names
    except DataError:
        is_readable = False
    rename = f'set data.columns = {{{kind} = "{column}"}}, ' if is_readable else ""
    return f"{rename}put all files into one column{'' if is_readable else f' {kind!r}'}"
