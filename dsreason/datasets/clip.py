"""Clips that the Hub does not have, cut from the raw videos as their names say (`clip_rules`).

Exactly: frames are decoded and encoded again, because a copied stream can only begin at a key frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import av
from av.video.frame import PictureType, VideoFrame

from dsreason.config.schema import SourceConfig
from dsreason.data.rows import JSON_SUFFIXES, read_rows
from dsreason.datasets.clip_rules import Cut, MissingRaw, Rule, check_name
from dsreason.datasets.processes import tracked
from dsreason.errors import ConfigError, DataError
from dsreason.files.atomic import draft_of
from dsreason.media.media import UnusableTimes, frames_by_count, frames_by_time, load_image, opened_video, packet_times
from dsreason.problems import listed

ENCODER: Final = "libx264"
OPTIONS = {"crf": "18", "preset": "medium"}
"""Visually lossless."""
IMAGE_FPS = Fraction(30)
"""As cosmos-reason1 writes the clips of BridgeData V2, though that was recorded at 5 frames per second: what a model is asked
about such a clip, and how many of its frames it sees, depends on it."""
IMAGES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Clips:
    """What became of the clips asked for."""

    cut: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    """They were there already."""
    missing: list[str] = field(default_factory=list)
    """A text for each whose raw video is not there."""
    failed: list[str] = field(default_factory=list)
    """A text for each that could not be cut."""


def needed_clips(folder: Path, dataset: str, annotations: Sequence[Path] = ()) -> list[str]:
    """The names (without `.mp4`) in the `video` fields of annotation files; by default all JSON files in `folder`.

    Raises:
        DataError: no annotations, or names that do not follow the rule of the data set.
    """
    files = list(annotations) or sorted(file for file in folder.glob("*") if file.suffix.lower() in JSON_SUFFIXES)
    if not files:
        raise DataError(
            f"{folder}: no annotation file (.json, .jsonl); get it with dsreason data fetch, or name it with --annotations"
        )
    names: dict[str, None] = {}
    problems = []
    for file in files:
        rows = read_rows(SourceConfig(path=str(file)))
        for index in range(len(rows)):
            try:
                names[clip_name(rows[index], dataset)] = None
            except DataError as error:
                problems.append(f"{rows.location(index)}: {error}")
    if problems:
        shown = listed(problems, 10, separator="\n  ")
        raise DataError(f"{len(problems)} rows do not name a clip of {dataset}:\n  {shown}")
    return list(names)


def clip_name(row: Any, dataset: str) -> str:
    """`{"video": "clips/a.mp4"}` → `a`."""
    video = row.get("video") if isinstance(row, dict) else None
    if not isinstance(video, str) or not video:
        raise DataError(f"field 'video': needs the path of a clip, is {video!r:.100}")
    name = video.removeprefix("clips/").removesuffix(".mp4")
    check_name(name, dataset)
    return name


def cut_clips(names: Sequence[str], rule: Rule, folder: Path, *, workers: int = 0) -> Clips:
    """Cut those clips that are not in `folder` yet, each as `<name>.mp4`, in `workers` processes (0: in this one)."""
    folder.mkdir(parents=True, exist_ok=True)
    clips = Clips(present=[name for name in names if (folder / f"{name}.mp4").is_file()])
    cuts: list[tuple[str, Cut]] = []
    present = set(clips.present)
    for name in (name for name in names if name not in present):
        try:
            cuts.append((name, rule(name)))
        except MissingRaw as error:
            clips.missing.append(f"{name}: {error}")
        except DataError as error:
            clips.failed.append(f"{name}: {error}")
    cuts.sort(key=lambda task: task[1].source)  # those of one raw video together
    results = tracked(
        partial(cut_one, folder=folder), cuts, lambda task: str(task[1].source), workers, "cutting", "clips"
    )
    for (name, _), result in zip(cuts, results, strict=True):
        if isinstance(result, DataError):
            clips.failed.append(f"{name}: {result}")
        else:
            clips.cut.append(name)
    return clips


def cut_one(task: tuple[str, Cut], folder: Path) -> None:
    name, cut = task
    cut_clip(cut, folder / f"{name}.mp4")


# ---------------------------------------------------------------- one clip


def cut_clip(cut: Cut, target: Path) -> None:
    """Write the frames of `cut` to `target` (H.264 in MP4, no sound), which appears only when complete.

    Every frame keeps its time and size (an odd side loses a pixel, which H.264 needs), also where the raw video's frame
    rate varies.

    Raises:
        DataError: the raw video is damaged, or has not these frames.
        ConfigError: PyAV has no H.264 encoder.
    """
    if ENCODER not in av.codecs_available:
        raise ConfigError(f"PyAV was built without {ENCODER}; install the wheel from the package index")
    try:
        with draft_of(target) as draft:
            if cut.source.is_dir():
                encode(image_frames(cut), IMAGE_FPS, draft)
                return
            video = timing(cut.source)
            wanted = frames_of_cut(cut, video)
            try:
                encode(frames_by_time(cut.source, wanted, video.times), video.fps, draft)
            except UnusableTimes:
                encode(counted_frames(cut.source, wanted, video), video.fps, draft)
    except av.FFmpegError as error:
        raise DataError(f"{target.name}: cannot be cut from {cut.source}: {error.strerror}") from error


# ---------------------------------------------------------------- which frames


@dataclass(frozen=True)
class Timing:
    """Number of frames, their time stamps (none where the file has no usable ones), the unit of these, and the rate."""

    count: int
    times: list[int]
    time_base: Fraction | None
    fps: Fraction


def timing(source: Path) -> Timing:
    status = source.stat()
    return _timing(source.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)  # many clips come from one recording, and finding the times reads all of it
def _timing(source: Path, modified: int, size: int) -> Timing:
    with opened_video(source) as (container, stream):
        count, times = packet_times(container, stream)
        fps = stream.average_rate or stream.guessed_rate
        if not fps:
            raise DataError(f"{source}: the frame rate cannot be determined from the header")
        return Timing(count, times, stream.time_base, fps)


def frames_of_cut(cut: Cut, video: Timing) -> range:
    check_total(cut, video.count)
    if cut.unit == "frames":
        start, end = int(cut.start), int(cut.end)
    elif video.times and video.time_base:
        start, end = frames_between(video.times, video.time_base, cut.start, cut.end)
    else:
        raise DataError(f"{cut.source}: its frames have no times, so that seconds cannot be cut out of it")
    if end > video.count or start == end:
        raise DataError(
            f"{cut.source}: has {video.count} frames; {cut.start:g} to {cut.end:g} {cut.unit} do not lie within them"
        )
    return range(start, end)


def frames_between(times: list[int], time_base: Fraction, start: float, end: float) -> tuple[int, int]:
    """First frame shown at or after `start` seconds, and the first one at or after `end`; `times` are ascending.

    An end up to a frame behind the last one is the video's own end. Example: times 0, 100, 200 of 1/1000 s, 0.1 s to
    0.2 s → (1, 2).
    """
    slack = 1e-6  # 0.7 s x 10 frames a second is 7.000000000000001 in binary
    seconds = [float((time - times[0]) * time_base) for time in times]
    first = next((i for i, shown in enumerate(seconds) if shown >= start - slack), len(seconds))
    step = seconds[-1] / (len(seconds) - 1) if len(seconds) > 1 else 0.0
    if end > seconds[-1] + step + slack:
        return first, len(seconds) + 1
    return first, next((i for i, shown in enumerate(seconds) if shown >= end - slack), len(seconds))


def check_total(cut: Cut, count: int) -> None:
    # BridgeData V2 has one image more than actions, and either may have been counted.
    if cut.total is not None and abs(count - cut.total) > 1:
        raise DataError(f"{cut.source}: has {count} frames, the clip's name says {cut.total}: not the same episode")


# ---------------------------------------------------------------- their pixels


def counted_frames(source: Path, wanted: range, video: Timing) -> Iterator[VideoFrame]:
    """With times of their own where the file has no usable ones."""
    for number, frame in enumerate(frames_by_count(source, wanted)):
        if not video.times:
            frame.pts, frame.time_base = number, 1 / video.fps
        yield frame


def image_frames(cut: Cut) -> Iterator[VideoFrame]:
    """Of a folder with im_0.jpg, im_1.jpg, …, in the order of their numbers."""
    files = sorted((f for f in cut.source.iterdir() if f.suffix.lower() in IMAGES), key=image_number)
    check_total(cut, len(files))
    if cut.end > len(files):
        raise DataError(f"{cut.source}: has {len(files)} images; the clip needs {cut.end:g}")
    for number, file in enumerate(files[int(cut.start) : int(cut.end)]):
        frame = VideoFrame.from_image(load_image(file))
        frame.pts, frame.time_base, frame.duration = number, Fraction(1, IMAGE_FPS), 1
        yield frame


def image_number(file: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", file.stem)
    return (int(digits[-1]) if digits else -1), file.name


# ---------------------------------------------------------------- writing


def encode(frames: Iterator[VideoFrame], fps: Fraction, target: Path) -> None:
    """All frames, the first one shown at 0. DataError where one has no time."""
    first = next(frames)
    origin, unit = time_of(first)
    with av.open(str(target), "w", format="mp4") as container:
        stream = container.add_stream(ENCODER, rate=fps, options=OPTIONS)
        stream.width, stream.height = first.width // 2 * 2, first.height // 2 * 2
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = stream.time_base = unit
        stream.codec_context.thread_count = 1  # clips are cut side by side
        if first.rotation:
            stream.set_display_rotation(first.rotation)
        for frame in chain([first], frames):
            shown = frame.reformat(stream.width, stream.height, format="yuv420p")
            shown.pts, shown.time_base, shown.duration = time_of(frame)[0] - origin, unit, frame.duration
            shown.pict_type = PictureType.NONE  # the encoder chooses its key frames itself
            container.mux(stream.encode(shown))
        container.mux(stream.encode())


def time_of(frame: VideoFrame) -> tuple[int, Fraction]:
    """Its time stamp, and the seconds that one of it counts."""
    if frame.pts is None or frame.time_base is None:
        raise DataError("a frame has no time, so that the clip cannot keep it; convert the raw video first")
    return frame.pts, frame.time_base
