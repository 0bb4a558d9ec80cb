"""Clips as files that people can look at."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dsreason.files.atomic import open_draft

Pixels = NDArray[np.uint8]
"""`[3, T, H, W]`."""

SMALLEST, LARGEST = 128, 320
"""Longest side of a small copy, in pixels."""
MOST_FRAMES = 48
"""Most frames of a GIF, evenly spaced: GIF compresses badly."""


def write_mp4(clip: Pixels, file: Path, fps: float) -> None:
    """H.264, whole or not at all. Odd sizes lose their last row or column, as the format wants."""
    file.parent.mkdir(parents=True, exist_ok=True)
    _, _, height, width = clip.shape
    with open_draft(file) as draft, av.open(str(draft), "w", format="mp4") as container:
        rate = Fraction(fps).limit_denominator(1000)
        stream = container.add_stream("libx264", rate=rate, options={"crf": "18", "preset": "fast"})
        stream.height, stream.width, stream.pix_fmt = height // 2 * 2, width // 2 * 2, "yuv420p"
        for pixels in list_frames(clip):
            frame = av.VideoFrame.from_ndarray(pixels[: stream.height, : stream.width].copy(), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def encode_gif(clip: Pixels, fps: float) -> bytes:
    """An animated GIF, which TensorBoard shows; of a long clip every second frame, or every third …, at the same speed."""
    stride = -(-clip.shape[1] // MOST_FRAMES)
    first, *other_frames = [Image.fromarray(frame) for frame in list_frames(clip)[::stride]]
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=other_frames, duration=round(1000 * stride / fps), loop=0)
    return file.getvalue()


def shrink(clip: Pixels, largest: int = LARGEST) -> Pixels:
    """A copy for pages: not larger than `largest`, and not so small that nothing can be seen."""
    _, _, height, width = clip.shape
    longest = max(height, width)
    if longest < SMALLEST:  # whole pixels stay whole pixels
        factor = -(-SMALLEST // longest)
        return clip.repeat(factor, axis=2).repeat(factor, axis=3)
    if longest <= largest:
        return clip
    size = tuple(max(2, round(side * largest / longest)) for side in (width, height))
    resized = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in list_frames(clip)]
    return np.stack(resized).transpose(3, 0, 1, 2)


def list_frames(clip: Pixels) -> Pixels:
    """`[T, H, W, 3]`."""
    return np.ascontiguousarray(clip.transpose(1, 2, 3, 0))
