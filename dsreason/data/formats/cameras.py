"""Camera names, which precede each image or video in the prompt. They come from a column or from the media item's object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsreason.data.formats.media_items import LABEL_KEYS, guess_kind
from dsreason.data.formats.media_places import RowMedia
from dsreason.data.formats.media_settings import parse_list
from dsreason.errors import DataError

NAME_COLUMNS = ("cameras", "views", "camera_names", "camera_labels", "view_names", "image_labels", "video_labels")
"""Columns that may list camera names."""


def find_label(item: Any, name: str | None) -> str | None:
    """Return the camera name of a media item: `name`, or the value of one of the item's keys. File names do not count.

    Raises:
        DataError: the item has two different camera names, or the name is not a string.
    """
    labels = [] if name is None else [name]
    for key in sorted(LABEL_KEYS & item.keys()) if isinstance(item, dict) else ():
        label = item[key]
        if label is None or label == "" or guess_kind(label):
            continue
        if not isinstance(label, str):
            raise DataError(
                f"the key {key!r} of an image or video must be the name of its camera; got {label!r:.100}; remove the key"
            )
        labels.append(label)
    if any(label != labels[0] for label in labels):
        raise DataError(f"an image or video has several names of cameras ({', '.join(labels):.200}); keep one of them")
    return labels[0] if labels else None


def add_names(row: Mapping[str, Any], media: RowMedia) -> None:
    """Add the camera names in the row's columns to its media.

    Raises:
        DataError: the number of names differs from the number of media, or the media already have different names.
    """
    num_media = sum(map(len, media.waiting.values()))
    if media.labels and len(media.labels) != num_media:
        raise DataError("some media have a camera name and others have none; name all of them, or use lists")
    for column in NAME_COLUMNS if num_media else ():
        names = parse_list(row.get(column))
        if not is_name_list(names):
            continue
        if len(names) != num_media or names != (media.labels or names):
            raise DataError(
                f"the column {column!r} names the cameras {', '.join(names):.100}, but the row has {num_media} images and videos"
                + (f" with the names {', '.join(media.labels):.100}" if media.labels else "")
                + "; use one name for each, or rename the column"
            )
        media.labels = names
        media.columns.add(column)
    names = parse_list(row.get("labels"))
    if num_media > 1 and is_name_list(names) and len(names) == num_media and names != media.labels:
        raise DataError(
            f"the column 'labels' has a text for each image and video ({', '.join(names):.100}); if these are names of cameras, "
            'set data.columns = {cameras = "labels"}, otherwise rename the column'
        )


def is_name_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(name, str) and not guess_kind(name) for name in value)
    )
