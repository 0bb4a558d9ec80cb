"""Thumbnails of a question's media, as data URIs that can be embedded in an HTML file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.progress import track

from dsreason.errors import DataError
from dsreason.evaluation.types import Result
from dsreason.media.frames import is_frame_list
from dsreason.media.images import load_image
from dsreason.media.videos import load_video, probe_video
from dsreason.monitor.console import open_console

FRAMES = 6
"""Number of frames to show per video, evenly spaced from the first to the last."""
LONGEST_SIDE = 160
JPEG_QUALITY = 70
MAX_BYTES = 30_000_000
"""Maximum total size of all pictures, in bytes, if there is no limit on the number of questions. With the texts of 5000
questions, the report is then about 50 MB in size."""
VIDEO_SUFFIXES = frozenset((".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".wmv", ".flv"))


@dataclass(frozen=True)
class Picture:
    uri: str
    label: str
    """Time of a frame, such as `0.5 s`; empty for an image."""
    width: int
    height: int


@dataclass(frozen=True)
class Sheet:
    """The pictures for a question, and error messages for media that cannot be read."""

    pictures: tuple[Picture, ...]
    notes: tuple[str, ...]


def draw_sheets(results: Sequence[Result], limit: int | None = None) -> dict[str, Sheet]:
    """Draw pictures for the first `limit` results, or for as many as fit into `MAX_BYTES`, and return them by question id.

    Progress is shown on stderr. Media that several questions share are read only once.
    """
    drawn: dict[tuple[str, ...], Sheet] = {}
    sheets: dict[str, Sheet] = {}
    num_bytes = 0
    console = open_console(stderr=True)
    for result in track(results[:limit], "extracting frames for the report", console=console, transient=True):
        if limit is None and num_bytes > MAX_BYTES:
            break
        media = tuple(result.media)
        sheet = drawn[media] = drawn.get(media) or draw_sheet(media)
        num_bytes += sum(len(picture.uri) for picture in sheet.pictures)
        sheets[result.id] = sheet
    return sheets


def draw_sheet(media: Sequence[str]) -> Sheet:
    pictures: list[Picture] = []
    notes: list[str] = []
    for path in media:
        try:
            pictures += _read_pictures(path)
        except (DataError, OSError) as error:  # OSError is raised, for example, if the path is too long
            notes.append(str(error))
    return Sheet(tuple(pictures), tuple(notes))


def _read_pictures(path: str) -> list[Picture]:
    suffix = Path(path).suffix.lower()
    if suffix not in VIDEO_SUFFIXES and not is_frame_list(path):
        try:
            return [_make_thumbnail(load_image(path))]
        except DataError:
            if suffix:  # media without a suffix, such as those extracted from a table, may be videos
                raise
    return _read_frames(path)


def _read_frames(path: str) -> list[Picture]:
    info = probe_video(path)
    count = min(FRAMES, info.num_frames)
    indices = [round(i * (info.num_frames - 1) / max(1, count - 1)) for i in range(count)]
    frames = load_video(path, indices, size=_fit_size(info.height, info.width))
    return [
        _make_thumbnail(Image.fromarray(frame), f"{info.get_second(index):.1f} s")
        for index, frame in zip(indices, frames, strict=True)
    ]


def _make_thumbnail(image: Image.Image, label: str = "") -> Picture:
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    uri = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    return Picture(uri, label, image.width, image.height)


def _fit_size(height: int, width: int) -> tuple[int, int]:
    """Scale the size down, if necessary, so that neither side exceeds `LONGEST_SIDE`; return (height, width)."""
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))
