"""Videos given as frames: image files in order, with their timestamps.

A video's frames are listed in a small file in the media cache, `<digest>.frames.json`, whose path stands for the video.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.archives import get_media_cache, write_cached
from dsreason.media.files import IMAGE_SUFFIXES, is_image_content
from dsreason.media.images import load_image, probe_image
from dsreason.media.urls import is_url
from dsreason.media.vision import PART_SETTINGS, SHORTEST_GAP, VideoInfo
from dsreason.problems import find_nearest

SUFFIX = ".frames.json"
TIMES = ("fps", "timestamps")
"""Keys of a media part that specify the times of its frames."""
FRAME_RATES = ("sample_fps", "raw_fps")
"""Keys for frame rates in qwen-vl-utils; only the first is read (as `fps`), and only for a video given as frames."""
FRAME_RATE_HINT = "; use 'fps': the frames per second to sample from a video file, or those of a video given as frames"
MAX_FRAME_FILES = 100_000
"""Maximum number of frames. It is limited because all headers are read before the first frame is used."""
MAX_SECONDS = 1_000_000.0
"""Maximum accepted timestamp in seconds (11 days). Larger numbers are clock times, or are not in seconds."""
EVEN = 1e-6
"""Maximum deviation in seconds at which timestamps count as evenly spaced."""


@dataclass(frozen=True)
class FrameList:
    """The paths of a video's frames in order, their timestamps, and the frame rate (the mean rate for unevenly spaced frames)."""

    paths: tuple[str, ...]
    seconds: tuple[float, ...]
    fps: float

    @property
    def timestamps(self) -> tuple[float, ...]:
        """Timestamp of each frame in seconds; empty if the frame rate determines the timestamps."""
        is_even = all(abs(second - i / self.fps) < EVEN for i, second in enumerate(self.seconds))
        return () if is_even else self.seconds

    @property
    def times(self) -> dict[str, Any]:
        """The frame rate or the timestamps, as a data set's row specifies them."""
        return {"timestamps": list(self.timestamps)} if self.timestamps else {"fps": self.fps}


# ---------------------------------------------------------------- building a frame list


def list_frames(path: str) -> list[str] | None:
    """Return the frames in a folder or matching a pattern, ordered by the numbers in their names.

    Return None if `path` is neither, or is a pattern that matches no file. In a folder, only images count as frames.

    Raises:
        DataError: the folder has no images, or the path is a pattern on S3.
    """
    if is_frame_list(path):
        raise DataError(
            f"video: {path} is a file of dsreason's cache; give the frames as a list, a folder or a pattern"
        )
    if is_url(path):
        return None
    if is_s3(path):
        if "*" in path:
            raise DataError(f"video: {path} is a pattern, which is not supported on S3; give the list of the frames")
        return None
    if os.path.isdir(path):
        names = [name for name in os.listdir(path) if name.lower().endswith(IMAGE_SUFFIXES) and name[0] != "."]
        if not names:
            raise DataError(f"video: the folder {path} has no images ({', '.join(IMAGE_SUFFIXES)}); correct the path")
        return [os.path.join(path, name) for name in sorted(names, key=make_natural_key)]
    if os.path.isfile(path) or not any(mark in path for mark in "*?["):
        return None
    base = next(folder for folder in Path(path).parents if os.path.isdir(folder))  # the folder's name may contain "["
    matches = glob.glob(os.path.relpath(path, base), root_dir=base)
    files = [file for name in sorted(matches, key=make_natural_key) if os.path.isfile(file := os.path.join(base, name))]
    return files or None


def make_natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that compares the numbers in names by value: `frame_9.png` comes before `frame_10.png`."""
    pieces = re.split("([0-9]+)", name)
    return [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)], name


def write_frame_list(paths: Sequence[str], part: Mapping[str, Any]) -> Path:
    """Write a video's frame list to the cache and return its path; `part` has the frame rate or the timestamps.

    Raises:
        DataError: the video has no frames or too many, or their times are missing or wrong.
    """
    if not 0 < len(paths) <= MAX_FRAME_FILES:
        raise DataError(f"video: has {len(paths)} frames; the number must be between 1 and {MAX_FRAME_FILES}")
    seconds, fps = read_times(part, len(paths))
    content = json.dumps({"frames": list(paths), "seconds": seconds, "fps": fps})
    return write_cached(content.encode("utf-8", "surrogateescape"), SUFFIX)


def read_times(part: Mapping[str, Any], num_frames: int) -> tuple[list[float], float]:
    """Return each frame's time in seconds and the (mean) frame rate. Raise DataError if the part does not specify them."""
    fps: Any = to_number(part.get("fps"))
    timestamps: Any = part.get("timestamps")
    if isinstance(timestamps, list):
        timestamps = [to_number(second) for second in timestamps]
    if (fps is None) == (timestamps is None):
        raise DataError(
            f"video: is given as {num_frames} frames, and their times are "
            + ("missing" if fps is None else "given twice, as 'fps' and 'timestamps'")
            + "; set either 'fps', the number of frames per second, or 'timestamps', a list of the time of each frame in seconds"
        )
    if timestamps is None:
        if not is_number(fps) or not 0 < fps < math.inf:
            raise DataError(f"video: fps is {fps!r:.100}; it must be the number of frames per second, greater than 0")
        return [i / fps for i in range(num_frames)], float(fps)
    if not isinstance(timestamps, list) or not all(map(is_number, timestamps)):
        raise DataError(
            f"video: timestamps is {timestamps!r:.100}; it must be a list of the time of each frame in seconds"
        )
    if len(timestamps) != num_frames:
        raise DataError(f"video: {len(timestamps)} timestamps for {num_frames} frames; give one per frame")
    for i, second in enumerate(timestamps):
        if not 0 <= second <= MAX_SECONDS:
            raise DataError(
                f"video: timestamps[{i}] is {second!r}; they must be seconds between 0 and {MAX_SECONDS:.0f}; subtract the time "
                "at which the video starts"
            )
        if i and second - timestamps[i - 1] < SHORTEST_GAP - EVEN:
            raise DataError(
                f"video: timestamps[{i}] ({second!r}) is not after timestamps[{i - 1}] ({timestamps[i - 1]!r}); they must "
                f"increase, by at least {SHORTEST_GAP} s"
            )
    gaps = num_frames - 1
    return [float(second) for second in timestamps], gaps / (timestamps[-1] - timestamps[0]) if gaps else 1.0


def to_number(value: Any) -> Any:
    """Parse a number that a table stores as text; return other values unchanged."""
    for parse in (int, float):
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError:
            continue
    return value


def suggest_key(key: str) -> str:
    """Return a hint about an unknown key in a media part, such as the nearest valid key, to append to an error message."""
    if key in FRAME_RATES:
        return FRAME_RATE_HINT
    suggestion = find_nearest(key, PART_SETTINGS)
    return f"; did you mean {suggestion!r}?" if suggestion else ""


def check_no_image(raw: Any, path: str) -> None:
    """Raise DataError if a video is an image file, except for a GIF, which may be animated."""
    content = raw.get("bytes") if isinstance(raw, dict) else None
    is_image = path.lower().endswith(IMAGE_SUFFIXES) and not is_url(path) and not any(mark in path for mark in "*?")
    if (is_image and not path.lower().endswith(".gif")) or (
        isinstance(content, bytes) and is_image_content(content) and not content.startswith(b"GIF")
    ):
        raise DataError(f"video: {path} is an image; put it into 'image', or give the video as a list of its frames")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---------------------------------------------------------------- decoding a frame list


def is_frame_list(path: str | Path) -> bool:
    """Return whether a video's path points to a frame list."""
    return str(path).endswith(SUFFIX)


@lru_cache(maxsize=4096)
def read_frame_list(path: str) -> FrameList:
    """Read a frame list. Raise DataError if it is not in the cache or cannot be read."""
    file = Path(os.path.abspath(path))
    # A file outside the cache may have been written by someone else.
    if not file.is_relative_to(os.path.abspath(get_media_cache())):
        raise DataError(f"{path}: is not in the cache {get_media_cache()}; only lists of frames written there are read")
    try:
        document = json.loads(file.read_text("utf-8", "surrogateescape"))
        return FrameList(tuple(document["frames"]), tuple(document["seconds"]), document["fps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: this list of frames cannot be read ({error}); delete it and start again") from error


def list_files(path: str) -> tuple[str, ...]:
    """Return the files that make up a media item: the frames in its frame list, or the file itself."""
    return read_frame_list(path).paths if is_frame_list(path) else (path,)


def expand_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a media part as a row specifies it: a frame list is replaced with the frames' files and times."""
    if part["type"] != "video" or not is_frame_list(part["video"]):
        return part
    frames = read_frame_list(part["video"])
    settings = {key: value for key, value in part.items() if key not in TIMES}
    return {**settings, "video": list(frames.paths), **frames.times}


def describe_video_path(path: str) -> str:
    """Return a video's path for messages; for a video given as frames, its first and last file: `pour/00.png … 03.png`."""
    first, *others = list_files(path)
    return f"{first} … {PurePath(others[-1]).name}" if others else first


@lru_cache(maxsize=4096)
def probe_frames(path: str) -> VideoInfo:
    """Return the frame count, frame rate and size, reading only the frames' headers.

    Raises:
        DataError: a frame cannot be read, or the frames differ in size. Frames are not resized to a common size;
            qwen-vl-utils and transformers, too, fail when they stack such frames.
    """
    frames = read_frame_list(path)
    first, *others = frames.paths
    height, width = probe_image(first)
    for other in others:
        if (size := probe_image(other)) != (height, width):
            raise DataError(
                f"{other}: has {size[1]}x{size[0]} pixels, but the first frame ({first}) has {width}x{height}; the frames of a "
                "video must have the same size, so resize or crop them"
            )
    count, timestamps = len(frames.paths), frames.timestamps
    return VideoInfo(count, frames.fps, height, width, count / frames.fps, is_frames=True, timestamps=timestamps)


def iter_frame_pixels(path: str, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames at `indices` as uint8 [H, W, 3]. Raise DataError if one cannot be decoded."""
    info, paths = probe_frames(path), read_frame_list(path).paths
    for index in indices:
        if index >= len(paths):
            raise DataError(f"{describe_video_path(path)}: frame {index} was requested, but only {len(paths)} exist")
        pixels = np.array(load_image(paths[index]))
        if pixels.shape[:2] != (info.height, info.width):
            raise DataError(f"{paths[index]}: its size has changed since the start; start again")
        yield pixels
