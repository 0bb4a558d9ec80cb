"""Media settings in columns and objects, including clip limits under the names that other tools use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsreason.errors import DataError
from dsreason.media.frames import FRAME_RATE_HINT, is_number, to_number
from dsreason.media.vision import PART_SETTINGS

IMAGE_SETTINGS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Columns that set an option for the row's only image or video; the other `PART_SETTINGS` apply only to videos."""
FRAMES_HINT = ", or, if the images are the frames of a video, rename their column to 'video'"
LIMITS = {
    "video_start": (
        "start",
        "start_time",
        "start_sec",
        "start_second",
        "start_seconds",
        "begin",
        "begin_time",
        "clip_start",
    ),
    "video_end": ("end", "end_time", "end_sec", "end_second", "end_seconds", "clip_end"),
}
"""Setting for a clip limit in seconds → its names in other tools."""
PAIR = "clip"
"""Key of a `[start, end]` list, in seconds."""
CLIP_KEYS = (*(name for names in LIMITS.values() for name in names), PAIR)
SPANS = ("time", "times", "timestamp", "time_range", "time_span", "segment", "span", "interval", "window")
"""Columns whose two numbers may be either the clip limits or the span that the model must find."""
FRAME_KEYS = (
    "start_frame",
    "end_frame",
    "frame_start",
    "frame_end",
    "begin_frame",
    "frame_range",
    "start_idx",
    "end_idx",
)
"""Names for clip limits that are frame numbers."""


def parse_list(value: Any) -> Any:
    """Parse a list or an object stored as JSON text, for example in a CSV file; return other values unchanged."""
    if not isinstance(value, str) or (value[:1], value[-1:]) not in (("[", "]"), ("{", "}")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # a path such as "[1]/[2]"


def read_clip(values: Mapping[str, Any], noun: str) -> list[tuple[str, str, float]]:
    """Return (name, setting, seconds) for each clip limit in an object or a row.

    Args:
        noun: what error messages call a name: "key" or "column".

    Raises:
        DataError: a limit is not a number, or two names for the same limit have different values.
    """
    limits = [
        (name, setting, values[name])
        for setting, names in LIMITS.items()
        for name in names
        if values.get(name) not in (None, "")
    ]
    pair = parse_list(values.get(PAIR))
    if isinstance(pair, list | dict) and pair:
        if not is_pair(pair):
            raise DataError(f"the {noun} 'clip' must be a list [start, end] in seconds; got {pair!r:.100}")
        limits += zip((PAIR, PAIR), LIMITS, pair, strict=True)
    seconds: dict[str, float] = {}
    for name, setting, raw in limits:
        second = to_number(raw)
        if not is_number(second):
            raise DataError(
                f"the {noun} {name!r} must be a number of seconds from the start of the video; got {raw!r:.100}"
            )
        if seconds.setdefault(setting, second) != second:
            raise DataError(
                f"the {noun} {name!r} is {second!r}, but another {noun} sets the same limit to {seconds[setting]!r}; "
                "remove one of them"
            )
    return [(name, setting, seconds[setting]) for name, setting, _ in limits]


def is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(to_number(second)) for second in value)


def apply_settings(parts: list[dict[str, Any]], row: Mapping[str, Any], used: set[str]) -> set[str]:
    """Add the settings in the row's columns to its only video or image, and return the names of these columns.

    Raises:
        DataError: a setting applies to no media item or to several, or the media item already has a different value for it.
    """
    if row.get("timestamps") is not None and "timestamps" not in used:
        raise DataError(
            "the column 'timestamps' is for a video given as frames without own times, which the row lacks; remove it"
        )
    videos = [part for part in parts if part["type"] == "video"]
    settings = [
        (column, column, to_number(row[column]))
        for column in sorted(PART_SETTINGS - used)
        if row.get(column) not in (None, "", [])
    ]
    if videos:
        check_other_limits(row, used)
        settings += read_clip(row, "column")
    for column, setting, value in settings:
        targets = parts if setting in IMAGE_SETTINGS else videos
        if len(targets) != 1:
            raise DataError(
                f"the column {column!r} applies to a row with exactly one video"
                + (" or image" if setting in IMAGE_SETTINGS else "")
                + f", but this row has {len(videos)} videos and {len(parts) - len(videos)} images; put {setting!r} into the "
                f"parts{'' if videos else FRAMES_HINT}. {keep_for_rewards(column)}"
            )
        if targets[0].get(setting, value) != value:
            raise DataError(f"the column {column!r} is {value!r:.100}, but the part has {targets[0][setting]!r:.100}")
        targets[0][setting] = value
    return {column for column, _, _ in settings}


def check_other_limits(row: Mapping[str, Any], used: set[str]) -> None:
    """Raise DataError if a column has clip limits as frame numbers, an ambiguous time span, or an ambiguous frame rate."""
    for column in FRAME_KEYS:
        if row.get(column) not in (None, "", []):
            raise DataError(
                f"the column {column!r} counts frames; give the clip in seconds, in the columns 'video_start' and 'video_end'. "
                + keep_for_rewards(column)
            )
    for column in SPANS:
        if is_pair(parse_list(row.get(column))):
            raise DataError(
                f"the column {column!r} has two numbers, {row[column]!r:.100}, beside a video; to show only this clip, in "
                f'seconds, set data.columns = {{clip = "{column}"}}. ' + keep_for_rewards(column)
            )
    if row.get("sample_fps") is not None and "sample_fps" not in used:
        raise DataError(f"the column 'sample_fps' is not read{FRAME_RATE_HINT}. {keep_for_rewards('sample_fps')}")


def keep_for_rewards(column: str) -> str:
    return f'To keep it only for rewards, set data.columns = {{reward_{column} = "{column}"}}'
