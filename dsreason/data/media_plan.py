"""Plans for media items, made from the files' headers, and functions that decode and resize media as planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.video_utils import VideoMetadata

from dsreason.data.types import MediaKind
from dsreason.media import images, videos, vision

Medium = Image.Image | tuple[NDArray[np.uint8], dict[str, Any]]
"""Decoded and resized media item: an image or, for a video, (uint8 frames [N, H, W, 3], metadata in vLLM's format)."""


@dataclass(frozen=True)
class PlannedMedium:
    """A media item's final size and patch grid, computed from its header. `size` is (height, width) after resizing."""

    kind: MediaKind
    path: str
    size: tuple[int, int]
    grid: tuple[int, int, int]  # number of patches: time, height, width
    indices: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)  # empty for images


def load_medium(medium: PlannedMedium, decoder: Literal["pyav", "torchcodec"]) -> Medium:
    """Decode the file and resize its image or frames to the planned size."""
    if medium.kind == "video":
        frames = videos.load_video(medium.path, medium.indices, size=medium.size, decoder=decoder)
        return frames, dict(medium.metadata)
    image = images.load_image(medium.path)
    height, width = medium.size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def describe_video(info: vision.VideoInfo, chosen: vision.FrameChoice) -> dict[str, Any]:
    """Return a video's metadata in vLLM's format.

    `total_num_frames` is the number of frames in the range that was sampled. The processors use it to compute the seconds per
    frame group: sampled fps = sampled frames / total_num_frames x fps.

    Unevenly spaced frames are described as frames of a 1000 fps video, which keeps their timestamps exact. `total_num_frames` is
    then chosen such that the sampled fps matches the mean interval between the sampled frames.
    """
    fps, indices, total = info.fps, list(chosen.indices), chosen.range_frames
    if info.timestamps:
        fps, indices = float(vision.TICKS), [round(info.timestamps[index] * vision.TICKS) for index in chosen.indices]
        gaps = len(set(indices)) - 1
        total = round(len(indices) * (indices[-1] - indices[0]) / gaps) if gaps else len(indices)
    return {
        "total_num_frames": total,
        "fps": fps,
        "duration": info.duration,
        "video_backend": "pyav",
        "frames_indices": indices,
        "do_sample_frames": False,
    }


def convert_video_metadata(metadata: Mapping[str, Any]) -> VideoMetadata:
    """Convert a video's metadata from vLLM's format to the type that transformers' processors expect."""
    fields = {key: value for key, value in metadata.items() if key != "do_sample_frames"}
    return VideoMetadata(**fields | {"frames_indices": list(metadata["frames_indices"])})
