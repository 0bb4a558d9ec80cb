"""The media items in a column: their files in all common notations, their settings, and their kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from dsreason.data.formats.media_places import NAMES
from dsreason.data.formats.media_settings import CLIP_KEYS, FRAME_KEYS, read_clip
from dsreason.data.types import MediaKind
from dsreason.errors import DataError
from dsreason.media.embedded import is_base64_image
from dsreason.media.files import IMAGE_SUFFIXES, is_image_content
from dsreason.media.frames import TIMES
from dsreason.media.vision import PART_SETTINGS

FILE_KEYS = ("bytes", "path", "url", "file_name", "src", "image_url", "video_url")
"""Keys under which an object may contain a media file."""
LABEL_KEYS = frozenset(("label", "camera", "camera_name", "view", "name"))
"""Keys under which an object may contain the camera name."""
FRAME_TIMES = ("timestamp", "time")
"""Keys under which a frame may contain its time in seconds."""
FACTS = frozenset(
    (
        *(
            "type",
            "index",
            "id",
            "image_id",
            "video_id",
            "frame_index",
            "frame_id",
            "detail",
            "uri",
            "filename",
            "uuid",
        ),
        *(
            "width",
            "height",
            "size",
            "resolution",
            "format",
            "mode",
            "channels",
            "duration",
            "num_frames",
            "codec",
            "raw_fps",
        ),
        *("sha", "sha1", "sha256", "md5", "hash", "checksum", "etag", "file_size", "filesize", "mime_type", "mimetype"),
        *("media_type", "content_type", "license", "source", "split", "coco_url", "flickr_url", "date_captured"),
    )
)
"""Keys that describe a file and do not change a row's meaning."""
VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg"),
    *(".ts", ".3gp", ".ogv", ".wmv", ".flv", ".h264", ".hevc"),
)
VIDEO_MARKS = ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (8, b"AVI "), (0, b"FLV"), (0, b"\x00\x00\x01\xba"))
"""(offset, bytes) pairs by which video content is recognised."""


def has_no_file(value: Any) -> bool:
    """Return whether a value stands for "no file", which Arrow stores as null or as `{"bytes": null, "path": null}`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not value or (bool(inner) and all(map(has_no_file, inner)))


def find_file_key(item: Mapping[str, Any], kind: MediaKind) -> str | None:
    """Return the key under which an object contains its file or, for a video, its frames; None if it has no such key."""
    keys = (kind, *(("frames",) if kind == "video" else ()), *FILE_KEYS)
    return next((key for key in keys if item.get(key)), None)


def to_media_part(item: Any, kind: MediaKind, known: Sequence[str] = ()) -> dict[str, Any]:
    """Convert a column's item to a message part; it may already be one, such as `{"type": "image", "image": "a.png"}`.

    The caller handles the keys in `known` and the camera name.

    Raises:
        DataError: the item has no file, or a key that may change its meaning.
    """
    if isinstance(item, list) and kind == "video":
        return read_frames(item)
    if not isinstance(item, dict):
        return {"type": kind, kind: {"bytes": item, "path": None} if isinstance(item, bytes) else item}
    key = find_file_key(item, kind)
    if key is None:
        raise DataError(
            f"each item of the column '{kind}s' must have the key {kind!r}; got one with {', '.join(map(str, item))}; "
            f"{', '.join(FILE_KEYS)} are read as well"
        )
    if key in ("bytes", "path"):
        files = {name: item[name] for name in ("bytes", "path") if name in item}
        part: dict[str, Any] = {"type": kind, kind: files if "bytes" in files else files["path"]}
    else:
        part = to_media_part(item[key], kind)
    return part | read_settings(item, part, kind, known)


def read_settings(
    item: Mapping[str, Any], part: Mapping[str, Any], kind: MediaKind, known: Sequence[str]
) -> dict[str, Any]:
    """Return the settings in an object; its file is already in `part`."""
    settings: dict[str, Any] = {}
    if kind == "video":
        settings = {setting: second for _, setting, second in read_clip(item, "key")}
    ignored = {kind, *FILE_KEYS, *FACTS, *LABEL_KEYS, *known, *(("frames", *CLIP_KEYS) if kind == "video" else ())}
    for key, value in item.items():
        if key == "sample_fps" and isinstance(part[kind], list) and item[key] is not None:
            settings.setdefault("fps", value)  # the name in qwen-vl-utils
        elif key in PART_SETTINGS or key in TIMES:
            if item[key] is not None and settings.setdefault(key, value) != value:
                raise DataError(
                    f"{kind}: the key {key!r} is {value!r:.100}, but another key of the same object sets it to "
                    f"{settings[key]!r:.100}; remove one of them"
                )
        elif key not in ignored and not has_no_file(value):
            hint = (
                "give the clip in seconds, as 'video_start' and 'video_end'"
                if key in FRAME_KEYS
                else "remove it, or write it into the text"
            )
            raise DataError(
                f"an object with {'an image' if kind == 'image' else 'a video'} has the unknown key {key!r} ({value!r:.100}), "
                f"which may change its meaning; {hint}"
            )
    return settings


def read_frames(frames: list[Any]) -> dict[str, Any]:
    """Return a video's frames as a message part, with their times in seconds if each frame has a `timestamp` or `time`."""
    parts = [to_media_part(frame, "image", FRAME_TIMES) for frame in frames]
    for number, (frame, part) in enumerate(zip(frames, parts, strict=True)):
        extra = part.keys() - {"type", "image"} | (LABEL_KEYS & frame.keys() if isinstance(frame, dict) else set())
        if extra:
            raise DataError(
                f"frame {number} of a video has the key {min(extra)!r}, which only the video may have; move or remove it"
            )
    files = [part["image"] for part in parts]
    seconds = [find_timestamp(frame) for frame in frames]
    if all(second is None for second in seconds):
        return {"type": "video", "video": files}
    if None in seconds:
        raise DataError(f"frame {seconds.index(None)} of a video has no timestamp, but others have one; add it")
    return {"type": "video", "video": files, "timestamps": seconds}


def find_timestamp(frame: Any) -> Any:
    return (
        next((frame[key] for key in FRAME_TIMES if frame.get(key) is not None), None)
        if isinstance(frame, dict)
        else None
    )


def is_frame_list(items: Sequence[Any]) -> bool:
    """Return whether all items are images, and therefore the frames of one video."""
    return bool(items) and all(guess_kind(item) == "image" and "*" not in str(item)[:1000] for item in items)


def has_frames(item: Any) -> bool:
    """Return whether a video is given as frames: a list of files, a folder, or a glob."""
    if isinstance(item, list):
        return True
    if not isinstance(item, str) or item.startswith(("data:", "http:", "https:")):
        return False
    suffix = PurePosixPath(item).suffix.lower()
    return suffix not in VIDEO_SUFFIXES and (suffix not in IMAGE_SUFFIXES or any(mark in item for mark in "*?["))


# ---------------------------------------------------------------- files anywhere in a row


def iter_files(value: Any) -> Iterator[tuple[Any, MediaKind]]:
    """Yield (file, kind) for each media file in a value, including files in nested objects and lists."""
    if kind := guess_kind(value):
        yield value, kind
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from iter_files(inner)


def iter_names(file: Any) -> Iterator[str | bytes]:
    """Yield the paths and contents that identify a file, or the files in a list."""
    if isinstance(file, str | bytes):
        yield file
    elif isinstance(file, dict | list):
        for inner in (file.get(key) for key in FILE_KEYS) if isinstance(file, dict) else file:
            yield from iter_names(inner)


def is_same_file(one: str | bytes, other: str | bytes) -> bool:
    """Return whether two paths or contents are equal, or one path ends with the other."""
    if isinstance(one, str) and isinstance(other, str):
        return f"/{one}".endswith(f"/{other}") or f"/{other}".endswith(f"/{one}")
    return one == other


def guess_kind(value: Any) -> MediaKind | None:
    """Return the media kind of a path (by its suffix), a data URI, bytes, or an object with a file; None for other values.

    An object whose bytes are not recognised counts as an image.
    """
    if isinstance(value, bytes):
        if any(value[start : start + len(mark)] == mark for start, mark in VIDEO_MARKS):
            return "video"
        return "image" if is_image_content(value) else None
    if isinstance(value, dict):
        kind = next((kind for key in FILE_KEYS if (kind := guess_kind(value.get(key)))), None)
        return kind or ("image" if isinstance(value.get("bytes"), bytes) else None)
    if not isinstance(value, str):
        return None
    if is_base64_image(value):
        return "image"
    if len(value.split()) > 1:
        return None
    if value.startswith(("data:image/", "data:video/")):
        return NAMES[value[5:10]]
    suffix = PurePosixPath(value).suffix.lower()
    return "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else None
