"""The sizes and frames that qwen-vl-utils (and thus cosmos-rl) chooses for media, used to report how dsreason's choices differ.

The arithmetic is that of version 0.0.14 (`smart_nframes`, `calculate_video_frame_range`, `smart_resize`, `fetch_image` and
`fetch_video` in its `vision_process.py`), which ignores the processor's limits. The exception is a `max_pixels` below the default
smallest frame, with which 0.0.14 rejects the video; this module then follows 0.0.11, which accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsreason.errors import DataError
from dsreason.media.vision import MAX_ASPECT_RATIO, VideoInfo, repeat_last, sample_evenly

IMAGE_TOKENS = 4, 16_384
FRAME_TOKENS = 128, 768
VIDEO_TOKENS = 128_000 * 0.9
FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 768
PAIR = 2
"""Number of frames that the models process together."""


@dataclass(frozen=True)
class Shown:
    """The size of an image or video as the model sees it, in pixels and tokens, and the `indices` of a video's frames."""

    height: int
    width: int
    tokens: int
    indices: tuple[int, ...] = ()


def fit_image(height: int, width: int, part: Mapping[str, Any], factor: int) -> Shown:
    """Return the size to which an image is resized. `part` has a message part's settings; `factor` is patch size x merge size.

    Raises:
        DataError: qwen-vl-utils rejects the image.
    """
    settings = {key: value for key, value in part.items() if value is not None}
    low = settings.get("min_pixels", IMAGE_TOKENS[0] * factor**2)
    high = settings.get("max_pixels", IMAGE_TOKENS[1] * factor**2)
    size = fit_size(height, width, factor, low, high)
    return Shown(*size, tokens=size[0] * size[1] // factor**2)


def fit_video(info: VideoInfo, part: Mapping[str, Any], factor: int) -> Shown:
    """Return a video's chosen frames and their size; arguments and errors are as for `fit_image`.

    If a video is given as frames, all of them are used. Each is resized twice: first like an image, to multiples of twice the
    factor, and then like a frame.
    """
    settings = {key: value for key, value in part.items() if value is not None}
    if info.is_frames:
        indices = repeat_last(range(info.num_frames), PAIR)
        image = fit_image(info.height, info.width, part, 2 * factor)  # 0.0.14 passes `factor` as the patch size
        return fit_frames(image.height, image.width, indices, settings, factor)
    start, end = find_frame_range(info, settings)
    indices = sample_evenly(start, end, count_frames(settings, end - start + 1, info.fps))
    return fit_frames(info.height, info.width, indices, settings, factor)


def fit_frames(
    full_height: int, full_width: int, indices: tuple[int, ...], settings: Mapping[str, Any], factor: int
) -> Shown:
    """Return the frames at `indices` with the size to which each is resized."""
    low = settings.get("min_pixels", FRAME_TOKENS[0] * factor**2)
    share = settings.get("total_pixels", VIDEO_TOKENS * factor**2) / len(indices) * PAIR
    high = max(min(FRAME_TOKENS[1] * factor**2, share), int(low * 1.05))
    height, width = fit_size(full_height, full_width, factor, low, min(settings.get("max_pixels", high), high))
    return Shown(height, width, len(indices) // PAIR * height * width // factor**2, indices)


def find_frame_range(info: VideoInfo, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the indices of the first and last frame between `video_start` and `video_end`."""
    seconds, last = info.num_frames / info.fps, info.num_frames - 1
    start = math.ceil(min(settings.get("video_start", 0.0), seconds) * info.fps)
    end = last
    if "video_end" in settings:
        end = min(math.floor(min(settings["video_end"], seconds) * info.fps), last)
    if start >= end and settings.keys() & {"video_start", "video_end"}:
        raise DataError(f"rejects the frame range {start} to {end}")
    return start, end


def count_frames(settings: Mapping[str, Any], available: int, fps: float) -> int:
    """Return the number of frames to sample from `available` frames."""
    if "nframes" in settings:
        count: int = round(settings["nframes"] / PAIR) * PAIR
    else:
        low = math.ceil(settings.get("min_frames", MIN_FRAMES) / PAIR) * PAIR
        high = math.floor(settings.get("max_frames", min(MAX_FRAMES, available)) / PAIR) * PAIR
        count = available / fps * settings.get("fps", FPS)
        count = math.floor(min(max(count, low), high, available) / PAIR) * PAIR
    if not PAIR <= count <= available:
        raise DataError(f"cannot sample {count} of {available} frames")
    return count


def fit_size(height: int, width: int, factor: int, low: float, high: float) -> tuple[int, int]:
    """Return (height, width) as multiples of `factor`, with an area from `low` to `high` pixels."""
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        raise DataError(f"rejects the aspect ratio {ratio:.0f}")
    sides = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if sides[0] * sides[1] > high:
        shrink = math.sqrt(height * width / high)
        sides = [math.floor(side / shrink / factor) * factor for side in (height, width)]
    elif sides[0] * sides[1] < low:
        grow = math.sqrt(low / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    if not all(sides):
        raise DataError(f"rejects resizing {width}x{height} to {sides[1]}x{sides[0]}")
    return sides[0], sides[1]
