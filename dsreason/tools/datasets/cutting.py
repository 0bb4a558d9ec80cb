"""Functions that cut videos at exact frames.

Frames are decoded and re-encoded because a copied stream can only begin at a key frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Final

import av
from av.video.frame import PictureType, VideoFrame

from dsreason.errors import ConfigError, DataError
from dsreason.files.atomic import open_draft
from dsreason.media.images import load_image
from dsreason.media.time_limit import time_limit
from dsreason.media.videos import (
    UnusableTimes,
    iter_frames_by_count,
    iter_frames_by_time,
    open_video,
    read_packet_times,
)
from dsreason.tools.datasets.clip_rules import Cut

ENCODER: Final = "libx264"
OPTIONS = {"crf": "18", "preset": "medium"}
"""Encoder options for visually lossless quality."""
ENCODING = 10
"""Ratio of the time limit for cutting a clip to the time limit for decoding its raw video."""
IMAGE_FPS = Fraction(30)
"""Frame rate at which cosmos-reason1 writes the clips of BridgeData V2, although they were recorded at 5 frames per second.

The questions about such a clip, and the number of its frames that a model sees, depend on this rate.
"""
IMAGES = (".jpg", ".jpeg", ".png")


def cut_clip(cut: Cut, target: Path) -> None:
    """Write the frames of `cut` to `target` (H.264 in MP4, no sound). The file appears only when it is complete.

    Every frame keeps its time, even if the raw video's frame rate varies. It also keeps its size, except that an odd side loses
    one pixel, because H.264 needs even sides.

    Raises:
        DataError: the raw video is damaged or lacks some of these frames.
        ConfigError: PyAV has no H.264 encoder.
    """
    if ENCODER not in av.codecs_available:
        raise ConfigError(f"PyAV was built without {ENCODER}; install the wheel of av from PyPI")
    try:
        with open_draft(target) as draft:
            if cut.source.is_dir():
                encode(iter_image_frames(cut), IMAGE_FPS, draft)
                return
            video = read_timing(cut.source)
            wanted_frames = list_frames_of_cut(cut, video)
            with time_limit(cut.source, factor=ENCODING):
                try:
                    encode(iter_frames_by_time(cut.source, wanted_frames, video.times), video.fps, draft)
                except UnusableTimes:
                    encode(iter_counted_frames(cut.source, wanted_frames, video), video.fps, draft)
    except av.FFmpegError as error:
        raise DataError(f"{target.name}: cannot be cut from {cut.source}: {error.strerror}") from error


# ---------------------------------------------------------------- frame selection


@dataclass(frozen=True)
class Timing:
    """Timing of a video: number of frames, time stamps (empty if the file has no usable ones), their unit, and the frame rate."""

    count: int
    times: list[int]
    time_base: Fraction | None
    fps: Fraction


def read_timing(source: Path) -> Timing:
    status = source.stat()
    return _read_timing(source.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)  # many clips come from one recording, and reading its times takes a pass over the file
def _read_timing(source: Path, modified: int, size: int) -> Timing:
    with time_limit(source), open_video(source) as (container, stream):
        count, times = read_packet_times(container, stream)
        fps = stream.average_rate or stream.guessed_rate
        if not fps:
            raise DataError(f"{source}: the frame rate cannot be determined from the header")
        return Timing(count, times, stream.time_base, fps)


def list_frames_of_cut(cut: Cut, video: Timing) -> range:
    check_total(cut, video.count)
    if cut.unit == "frames":
        start, end = int(cut.start), int(cut.end)
    elif video.times and video.time_base:
        start, end = find_frames_between(video.times, video.time_base, cut.start, cut.end)
    else:
        raise DataError(f"{cut.source}: its frames have no time stamps, so a range in seconds cannot be cut")
    if end > video.count or start == end:
        raise DataError(
            f"{cut.source}: has {video.count} frames, but they do not cover the range {cut.start:g} to {cut.end:g} "
            f"{cut.unit}"
        )
    return range(start, end)


def find_frames_between(times: list[int], time_base: Fraction, start: float, end: float) -> tuple[int, int]:
    """Return the indices of the first frame displayed at or after `start` seconds, and of the first one at or after `end`.

    `times` must be ascending. An end up to one frame after the last frame counts as the end of the video. For a later end, the
    second index is larger than the number of frames.

    Example: times 0, 100, 200 in units of 1/1000 s, start 0.1 s, end 0.2 s → (1, 2).
    """
    slack = 1e-6  # 0.7 s x 10 frames per second is 7.000000000000001 in binary floating point
    seconds = [float((time - times[0]) * time_base) for time in times]
    first = next((i for i, frame_time in enumerate(seconds) if frame_time >= start - slack), len(seconds))
    step = seconds[-1] / (len(seconds) - 1) if len(seconds) > 1 else 0.0
    if end > seconds[-1] + step + slack:
        return first, len(seconds) + 1
    return first, next((i for i, frame_time in enumerate(seconds) if frame_time >= end - slack), len(seconds))


def check_total(cut: Cut, count: int) -> None:
    # BridgeData V2 has one more image than actions, and the name may contain either number.
    if cut.total is not None and abs(count - cut.total) > 1:
        raise DataError(
            f"{cut.source}: has {count} frames, but the clip's name says {cut.total}; this is another episode"
        )


# ---------------------------------------------------------------- decoding


def iter_counted_frames(source: Path, indices: range, video: Timing) -> Iterator[VideoFrame]:
    """Yield the frames at `indices`. If the file has no usable time stamps, the frames get evenly spaced ones."""
    for number, frame in enumerate(iter_frames_by_count(source, indices)):
        if not video.times:
            frame.pts, frame.time_base = number, 1 / video.fps
        yield frame


def iter_image_frames(cut: Cut) -> Iterator[VideoFrame]:
    """Yield the cut's images (im_0.jpg, im_1.jpg, …) in the order of their numbers."""
    files = sorted((f for f in cut.source.iterdir() if f.suffix.lower() in IMAGES), key=parse_image_number)
    check_total(cut, len(files))
    if cut.end > len(files):
        raise DataError(f"{cut.source}: has {len(files)} images, but the clip needs {cut.end:g}")
    for number, file in enumerate(files[int(cut.start) : int(cut.end)]):
        frame = VideoFrame.from_image(load_image(file))
        frame.pts, frame.time_base, frame.duration = number, Fraction(1, IMAGE_FPS), 1
        yield frame


def parse_image_number(file: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", file.stem)
    return (int(digits[-1]) if digits else -1), file.name


# ---------------------------------------------------------------- encoding


def encode(frames: Iterator[VideoFrame], fps: Fraction, target: Path) -> None:
    """Write all frames to `target`, with the first frame at time 0.

    Raises:
        DataError: a frame has no time.
    """
    first = next(frames)
    origin, unit = get_timestamp(first)
    with av.open(str(target), "w", format="mp4") as container:
        stream = container.add_stream(ENCODER, rate=fps, options=OPTIONS)
        stream.width, stream.height = first.width // 2 * 2, first.height // 2 * 2
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = stream.time_base = unit
        stream.codec_context.thread_count = 1  # one thread is enough, because several clips are cut in parallel
        if first.rotation:
            stream.set_display_rotation(first.rotation)
        for frame in chain([first], frames):
            converted = frame.reformat(stream.width, stream.height, format="yuv420p")
            converted.pts, converted.time_base, converted.duration = (
                get_timestamp(frame)[0] - origin,
                unit,
                frame.duration,
            )
            converted.pict_type = PictureType.NONE  # lets the encoder choose its own key frames
            container.mux(stream.encode(converted))
        container.mux(stream.encode())


def get_timestamp(frame: VideoFrame) -> tuple[int, Fraction]:
    """Return the frame's time stamp, and the unit of the time stamp in seconds."""
    if frame.pts is None or frame.time_base is None:
        raise DataError("a frame has no time stamp, which the clip must keep; convert the raw video first")
    return frame.pts, frame.time_base
