"""Functions that read clips from videos: they select, resize and crop frames."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.media.videos import load_video, probe_video
from dsreason.media.vision import VideoInfo
from dsreason.world.types import ClipSize, WorldRow

SLOWER = 0.01
"""Fraction by which a video's frame rate may fall below the requested rate: 29.97 frames per second count as 30."""


def read_clip(row: WorldRow, size: ClipSize) -> Tensor:
    """Read a clip from the video at the path `row.clip`, starting at second `row.meta["start"]` if set: uint8 `[3, T, H, W]`.

    Raises:
        DataError: the video is unreadable, too short or has too few frames per second; the message names the row.
    """
    try:
        return load_clip(str(row.clip), size, start=read_start(row))
    except DataError as error:
        raise DataError(f"{row.id}: {error}") from error


def load_clip(path: str | Path, size: ClipSize, *, start: float = 0.0, window: range | None = None) -> Tensor:
    """Read the video frames that are displayed at seconds `start` + k / `size.fps`, resized and centre-cropped.

    Args:
        window: numbers of the frames that belong to the clip, which replace `start`.
    """
    info = probe_video(path)
    if window is not None:
        if window.stop - 1 > info.num_frames:  # some tools write the frame after the last
            raise DataError(
                f"the window ends with frame {window.stop - 1}, but the video has only {info.num_frames} frames; correct it"
            )
        info = replace(info, num_frames=min(window.stop, info.num_frames))
        start = window.start / info.fps
    height, width = fit_size((info.height, info.width), (size.height, size.width))
    frames = load_video(path, choose_frames(info, size, start), size=(height, width))
    top, left_edge = (height - size.height) // 2, (width - size.width) // 2
    cut = frames[:, top : top + size.height, left_edge : left_edge + size.width]
    return torch.from_numpy(cut).permute(3, 0, 1, 2).contiguous()


def choose_frames(info: VideoInfo, size: ClipSize, start: float) -> list[int]:
    """Return the index of the frame that is displayed at each sampling time.

    If the video has a higher frame rate, some frames are skipped; no frame is ever repeated.

    Raises:
        DataError: the video has fewer frames per second than requested, or ends before the last sampling time.
    """
    rate = info.fps / size.fps
    if rate < 1 - SLOWER and size.frames > 1:
        raise DataError(
            f"the video has {info.fps:g} frames per second, fewer than data.fps ({size.fps:g}), so frames would be repeated; "
            f"lower data.fps to {info.fps:g}, or remove the video"
        )
    rate = max(rate, 1.0)
    first = math.floor(start * info.fps + 1e-6)
    indices = [first + math.floor(number * rate + 1e-6) for number in range(size.frames)]
    if indices[-1] >= info.num_frames:
        beginning = f" from second {start:g} on" if start else ""
        raise DataError(
            f"the video is too short: {size.frames} frames at {size.fps:g} per second need {indices[-1] + 1 - first} frames "
            f"at its {info.fps:g} per second{beginning}, but it has only {max(0, info.num_frames - first)}; "
            "lower data.frames or raise data.fps"
        )
    return indices


def fit_size(size: tuple[int, int], minimum: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest (height, width) with the aspect ratio of `size` that covers `minimum`."""
    scale = max(minimum[0] / size[0], minimum[1] / size[1])
    return max(minimum[0], round(size[0] * scale)), max(minimum[1], round(size[1] * scale))


def read_start(row: WorldRow) -> float:
    start = row.meta.get("start", 0.0)
    if isinstance(start, bool) or not isinstance(start, (int, float)) or not 0 <= start < math.inf:
        raise DataError(f"start must be a non-negative number of seconds; got {start!r}")
    return float(start)
