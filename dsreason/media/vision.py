"""The arithmetic that chooses a video's frames and the sizes of images and frames; it needs neither pixels nor torch.

The rules are those of qwen-vl-utils (`smart_nframes`, `calculate_video_frame_range`, `smart_resize`, `fetch_video` in
its `vision_process.py`); the differences between families are in `Family.vision`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dsreason.errors import DataError
from dsreason.families.family import Vision

MAX_ASPECT_RATIO = 200
MAX_IMAGE_PIXELS = 150_000_000
"""Maximum number of pixels of an image or video frame, before and after resizing. Even a small file can claim any size
(a decompression bomb)."""
TICKS = 1000
"""Time unit of unevenly spaced frames, whose metadata contains multiples of 1/1000 s."""
SHORTEST_GAP = 1 / TICKS
"""Minimum number of seconds between two frames."""
MAX_SETTING = 10**15
"""Largest value of the other settings: a float represents all whole numbers up to this one, and no product below overflows."""

PART_SETTINGS = frozenset(
    (
        "fps",
        "nframes",
        "min_frames",
        "max_frames",
        "min_pixels",
        "max_pixels",
        "total_pixels",
        "video_start",
        "video_end",
        "resized_height",
        "resized_width",
    )
)
GIVEN_SIZE_TOKENS = 4, 16384
"""Bounds on the tokens of an image or frame whose size a row gives, as in qwen-vl-utils."""


@dataclass(frozen=True)
class VideoInfo:
    """A video's frame count, average `fps`, `height` and `width` in pixels after rotation, and `duration` in seconds."""

    num_frames: int
    fps: float
    height: int
    width: int
    duration: float
    is_frames: bool = False
    """Whether the video is given as image files, all of which are shown by default."""
    timestamps: tuple[float, ...] = ()
    """Timestamp of each frame in seconds, if they are unevenly spaced or do not start at 0."""

    def get_second(self, index: int) -> float:
        """Return the time in seconds at which a frame is shown."""
        return self.timestamps[index] if self.timestamps else index / self.fps


@dataclass(frozen=True)
class PixelLimits:
    """A processor's bounds on the pixels of media. Both sides are multiples of `factor`, which is patch size x merge size.

    The family's `Vision.bounds_are_per_video` determines whether the bounds apply to a video or to each frame.
    """

    factor: int
    min_pixels: int
    max_pixels: int

    @property
    def token_pixels(self) -> int:
        """Pixels per token."""
        return self.factor**2


@dataclass(frozen=True)
class FrameChoice:
    """The `indices` of the sampled frames in the file, chosen from a range of `range_frames` frames."""

    indices: tuple[int, ...]
    range_frames: int


def sample_frames(info: VideoInfo, part: Mapping[str, Any], family: Vision, temporal_patch: int = 2) -> FrameChoice:
    """Choose evenly spaced frames, including the first and last of the range; their number is a multiple of `temporal_patch`.

    The number is `nframes` (rounded to a multiple) if set, otherwise duration x `fps`, limited by `min_frames`, `max_frames`
    and the number of frames in the range; `family` has the defaults. If the range has fewer frames than a temporal patch,
    frames are repeated.

    Without these settings, a video given as frames is shown whole, with the last frame repeated if necessary, as
    qwen-vl-utils does. If the frames are unevenly spaced, those nearest to evenly spaced times are chosen, each at most once.
    """
    settings = _read_settings(part)
    start, end = _find_frame_range(info, settings)
    available = end - start + 1
    if "nframes" in settings:
        count = _count_requested_frames(settings["nframes"], available, temporal_patch)
    else:
        count = _count_frames_at_rate(info, settings, family, available, temporal_patch)
    if info.is_frames and count >= available:
        return FrameChoice(repeat_last(range(start, end + 1), temporal_patch), count)
    if info.timestamps:
        seconds = np.linspace(info.timestamps[start], info.timestamps[end], count)
        nearest = np.interp(seconds, info.timestamps[start : end + 1], np.arange(start, end + 1)).round().astype(int)
        return FrameChoice(repeat_last(np.unique(nearest).tolist(), temporal_patch), available)
    return FrameChoice(sample_evenly(start, end, count), available)


def repeat_last(indices: Sequence[int], temporal_patch: int) -> tuple[int, ...]:
    """Repeat the last index until their number is a multiple of `temporal_patch`."""
    return (*indices, *[indices[-1]] * (-len(indices) % temporal_patch))


def sample_evenly(start: int, end: int, count: int) -> tuple[int, ...]:
    """Return `count` evenly spaced integers from `start` to `end`: `torch.linspace(start, end, count).round()`.

    Like torch, this function computes in float32, from both ends to the middle, and rounds each multiply-add once, as CPUs
    with fused multiply-add do. Exact arithmetic would sometimes give another result: one of 600 evenly spaced positions in
    18,000 frames is 17067.499, which is 17067.5 in float32.
    """
    if count == 1:
        return (start,)
    step = float(np.float32(end - start) / np.float32(count - 1))
    numbers = np.arange(count)
    spaced = np.where(numbers < count // 2, start + step * numbers, end - step * numbers[::-1])
    return tuple(int(number) for number in spaced.astype(np.float32).round())


def compute_image_size(height: int, width: int, part: Mapping[str, Any], limits: PixelLimits) -> tuple[int, int]:
    """Return the (height, width) to which an image is resized; see `compute_image_bounds`."""
    if (size := _find_given_size(_read_settings(part), limits)) is not None:
        return size
    min_pixels, max_pixels = compute_image_bounds(part, limits)
    return fit_size(height, width, factor=limits.factor, min_pixels=min_pixels, max_pixels=max_pixels)


def _find_given_size(settings: Mapping[str, Any], limits: PixelLimits) -> tuple[int, int] | None:
    """Return the size that a part's `resized_height` and `resized_width` give, as multiples of the factor; None without them.

    Like qwen-vl-utils, this ignores the pixel limits of the part.
    """
    height, width = settings.get("resized_height"), settings.get("resized_width")
    if height is None and width is None:
        return None
    if height is None or width is None:
        missing, given = ("resized_height", "resized_width") if height is None else ("resized_width", "resized_height")
        raise DataError(f"{given} ({settings[given]}) needs {missing}; add it, or remove {given}")
    low, high = (tokens * limits.token_pixels for tokens in GIVEN_SIZE_TOKENS)
    return fit_size(height, width, factor=limits.factor, min_pixels=low, max_pixels=high)


def compute_image_bounds(part: Mapping[str, Any], limits: PixelLimits) -> tuple[int, int]:
    """Return the minimum and maximum number of pixels of an image.

    `min_pixels` and `max_pixels` of the message part override `limits`.
    """
    settings = _read_settings(part)
    min_pixels = settings.get("min_pixels", min(limits.min_pixels, settings.get("max_pixels", limits.min_pixels)))
    return min_pixels, settings.get("max_pixels", max(limits.max_pixels, min_pixels))


def choose_image_limits(processor_limits: PixelLimits, family: Vision) -> PixelLimits:
    """Return the family's `trained_sizes`, or `processor_limits` if these forbid the largest of the trained images."""
    trained, cell = family.trained_sizes, processor_limits.token_pixels
    if trained is None or processor_limits.max_pixels < trained.image[1] * cell:
        return processor_limits
    return PixelLimits(processor_limits.factor, *(tokens * cell for tokens in trained.image))


def compute_frame_count_bounds(settings: Mapping[str, Any], family: Vision, temporal_patch: int) -> tuple[int, int]:
    """Return the bounds on the number of frames that are sampled at a rate, as multiples of `temporal_patch`."""
    low: float = settings.get("min_frames", min(family.min_frames, settings.get("max_frames", family.min_frames)))
    high: float = settings.get("max_frames", max(family.max_frames, low))
    return math.ceil(low / temporal_patch) * temporal_patch, math.floor(high / temporal_patch) * temporal_patch


class FrameBounds(NamedTuple):
    """The pixels of the smallest frame, the largest frame and all frames; the frames of one temporal patch count once."""

    smallest: float
    largest: float
    total: float


def choose_frame_bounds(
    num_frames: int, processor_limits: PixelLimits, family: Vision, temporal_patch: int = 2
) -> FrameBounds:
    """Return the default bounds for a video of `num_frames` sampled frames.

    The bounds are the family's `trained_sizes`, or `processor_limits` if these forbid the family's largest frame (or, if the
    limits are per video, a temporal patch of such frames).
    """
    cell, trained = processor_limits.token_pixels, family.trained_sizes
    frames = temporal_patch if family.bounds_are_per_video else 1
    if trained is not None and processor_limits.max_pixels >= frames * trained.frame[1] * cell:
        return FrameBounds(trained.frame[0] * cell, trained.frame[1] * cell, trained.video * cell)
    if family.bounds_are_per_video:
        return FrameBounds(
            processor_limits.min_pixels / num_frames,
            family.max_frame_tokens * cell,
            processor_limits.max_pixels / temporal_patch,
        )
    return FrameBounds(processor_limits.min_pixels, processor_limits.max_pixels, family.max_video_tokens * cell)


def compute_video_size(
    height: int,
    width: int,
    num_frames: int,
    part: Mapping[str, Any],
    limits: PixelLimits,
    family: Vision,
    temporal_patch: int = 2,
) -> tuple[int, int]:
    """Return the (height, width) to which each of `num_frames` sampled frames is resized.

    `total_pixels` limits the vision tokens of the video: the frames of one temporal patch count once, so that
    `total_pixels / factor**2` is the maximum number of tokens. The maximum pixels of a frame are (qwen-vl-utils `fetch_video`)
    `max(min(largest frame, total_pixels / num_frames * temporal_patch), 1.05 * min_pixels)`, but at most `max_pixels`.
    If `max_pixels` is below the default smallest frame, frames are not enlarged.
    """
    settings = _read_settings(part)
    if (size := _find_given_size(settings, limits)) is not None:
        return size
    smallest, largest, total = choose_frame_bounds(num_frames, limits, family, temporal_patch)
    min_pixels, total = settings.get("min_pixels", smallest), settings.get("total_pixels", total)
    max_pixels = max(min(largest, total / num_frames * temporal_patch), int(min_pixels * 1.05))
    max_pixels = min(max_pixels, settings.get("max_pixels", max_pixels))
    if max_pixels < min_pixels:
        min_pixels = 0
    return fit_size(height, width, factor=limits.factor, min_pixels=min_pixels, max_pixels=max_pixels)


def fit_size(height: float, width: float, *, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Return the nearest multiples of `factor` with about the same aspect ratio and an area within the bounds.

    If both bounds cannot be met, `max_pixels` takes precedence. No side is shorter than `factor`, so a thin strip may exceed
    `max_pixels`.
    """
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        raise DataError(
            f"the aspect ratio of {width}x{height} pixels is {ratio:.0f}, but the maximum is {MAX_ASPECT_RATIO}"
        )
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def _read_settings(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a part that are not None. Raise DataError for invalid values."""
    settings = {key: part[key] for key in PART_SETTINGS & part.keys() if part[key] is not None}
    for key, value in settings.items():
        most = MAX_IMAGE_PIXELS if key == "min_pixels" else MAX_SETTING
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{key} must be a number; got {value!r:.100}")
        if not 0 <= value <= most or (value == 0 and key != "video_start"):
            raise DataError(f"{key} must be greater than 0 and at most {most}; got {value!r:.100}")
    if "fps" in settings and "nframes" in settings:
        raise DataError(
            f"fps ({settings['fps']}) and nframes ({settings['nframes']}) are mutually exclusive; remove one"
        )
    for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
        if low in settings and high in settings and settings[low] > settings[high]:
            raise DataError(f"{low} ({settings[low]}) is greater than {high} ({settings[high]})")
    return settings


def _find_frame_range(info: VideoInfo, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first and last frame between `video_start` and `video_end`, clipped to the end of the video."""
    start_time, end_time = settings.get("video_start"), settings.get("video_end")
    if start_time is not None and end_time is not None and start_time >= end_time:
        raise DataError(f"video_start ({start_time} s) must be before video_end ({end_time} s)")
    if info.timestamps:
        return _find_range_by_time(info.timestamps, start_time or 0.0, math.inf if end_time is None else end_time)
    if start_time is not None and start_time >= info.duration:
        raise DataError(f"video_start ({start_time} s) must be before the end of the video ({info.duration:g} s)")
    # The tolerance of 1e-6 frames is for rounding: 0.28 s x 25 fps is 7.000000000000001 in floating point.
    start = 0 if start_time is None else math.ceil(start_time * info.fps - 1e-6)
    end = info.num_frames - 1 if end_time is None else min(math.floor(end_time * info.fps + 1e-6), info.num_frames - 1)
    if start > end:
        raise DataError(
            f"no frame lies between video_start ({start_time} s) and video_end ({end_time or info.duration:g} s) "
            f"at {info.fps:g} frames per second"
        )
    return start, end


def _find_range_by_time(timestamps: Sequence[float], start_time: float, end_time: float) -> tuple[int, int]:
    start, end = bisect_left(timestamps, start_time), bisect_right(timestamps, end_time) - 1
    if start > end:
        raise DataError(
            f"no frame lies between video_start ({start_time:g} s) and video_end ({end_time:g} s); the first is at "
            f"{timestamps[0]:g} s, the last at {timestamps[-1]:g} s"
        )
    return start, end


def _count_requested_frames(nframes: float, available: int, temporal_patch: int) -> int:
    count = max(temporal_patch, round(nframes / temporal_patch) * temporal_patch)
    if nframes > available:
        raise DataError(
            f"nframes is {nframes}, but the video (or its chosen range) has only {available} frames; lower nframes"
        )
    return min(count, max(temporal_patch, available // temporal_patch * temporal_patch))


def _count_frames_at_rate(
    info: VideoInfo, settings: Mapping[str, Any], family: Vision, available: int, temporal_patch: int
) -> int:
    fps: float = settings.get("fps", info.fps if info.is_frames else family.fps)
    low, high = compute_frame_count_bounds(settings, family, temporal_patch)
    count = min(max(available / info.fps * fps, low), high, available)
    if info.is_frames and count > available - 1e-6:
        return math.ceil(available / temporal_patch) * temporal_patch
    return max(temporal_patch, math.floor(count / temporal_patch) * temporal_patch)
