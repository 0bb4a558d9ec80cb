"""Timestamps written on video frames, for models that read times from frames, as in cosmos-reason's inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dsreason.data.media_plan import Medium, PlannedMedium
from dsreason.data.prompts import PromptEncoder
from dsreason.data.types import Sample

FONT_SIZE = 20


class TimestampEncoder(PromptEncoder):
    """An encoder that writes the time of each video frame in a black border below the frame.

    The size of the frame itself does not change. The border's height is `factor` (28 pixels for Qwen2.5-VL, 32 for Qwen3-VL),
    so the total height remains a multiple of `factor`, the text is not resized, and each frame has one more row of tokens.
    """

    def _plan_video(self, part: Mapping[str, Any]) -> PlannedMedium:
        planned = super()._plan_video(part)
        size = planned.size[0] + self._border, planned.size[1]
        return replace(planned, size=size, grid=self._compute_grid(len(planned.indices), size))

    def _load(self, sample: Sample, planned: list[PlannedMedium]) -> list[Medium]:
        bare = [
            replace(medium, size=(medium.size[0] - self._border, medium.size[1])) if medium.kind == "video" else medium
            for medium in planned
        ]
        return [self._stamp_medium(medium) for medium in super()._load(sample, bare)]

    @property
    def _border(self) -> int:
        return self._get_pixel_limits("video").factor

    def _stamp_medium(self, medium: Medium) -> Medium:
        if isinstance(medium, Image.Image):
            return medium
        frames, metadata = medium
        return stamp(
            frames, compute_frame_times(metadata), border=self._border, sections=self._temporal_patch
        ), metadata


def compute_frame_times(metadata: Mapping[str, Any]) -> list[float]:
    """Compute each sampled frame's time in seconds from the start of the file, even if `video_start` is set."""
    return [index / metadata["fps"] for index in metadata["frames_indices"]]


def stamp(
    frames: NDArray[np.uint8], times: Sequence[float], *, border: int = 28, sections: int = 2
) -> NDArray[np.uint8]:
    """Write each frame's time, such as "12.50s", in white on a black border below it.

    The model merges `sections` consecutive frames, so their labels would overlap. Therefore, each of these frames has its label
    in a separate section of the width, from left to right.

    Args:
        frames: `[N, H, W, 3]` uint8.

    Returns:
        `[N, H + border, W, 3]` uint8.

    Example: frames at `times` 0.0 and 0.5 show "0.00s" in the left half and "0.50s" in the right half.
    """
    num_frames, height, width, _ = frames.shape
    stamped = np.zeros((num_frames, height + border, width, 3), np.uint8)
    stamped[:, :height] = frames
    for number, time in enumerate(times):
        left_edge, right = (width * (number % sections + i) // sections for i in (0, 1))
        stamped[number, height:, left_edge:right] = _draw_label(f"{time:.2f}s", right - left_edge, border)
    return stamped


def _draw_label(text: str, width: int, height: int) -> NDArray[np.uint8]:
    """Draw white text centered on a black image, `[height, width, 3]`, in the largest font that fits, up to `FONT_SIZE`."""
    font = ImageFont.load_default(FONT_SIZE)
    if (length := font.getlength(text)) > width:
        font = ImageFont.load_default(FONT_SIZE * width / length)
    label = Image.new("RGB", (width, height))
    ImageDraw.Draw(label).text((width / 2, height / 2), text, fill="white", font=font, anchor="mm")
    return np.asarray(label)
