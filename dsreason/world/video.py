"""Export of clips as video and GIF files for viewing."""

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
"""Pixels of a clip: `[3, T, H, W]`."""

SMALLEST, LARGEST = 128, 320
"""Bounds for the longer side of a preview, in pixels."""
MOST_FRAMES = 48
"""Maximum number of frames in a GIF, evenly spaced over the clip, because GIF compresses poorly."""


def write_mp4(clip: Pixels, file: Path, fps: float) -> None:
    """Write the clip as H.264, atomically. Drop the last row or column of an odd side, because the format needs even sizes."""
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
    """Encode an animated GIF for TensorBoard. Long clips keep only every n-th frame, but play at the original speed."""
    stride = -(-clip.shape[1] // MOST_FRAMES)
    first, *other_frames = [Image.fromarray(frame) for frame in list_frames(clip)[::stride]]
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=other_frames, duration=round(1000 * stride / fps), loop=0)
    return file.getvalue()


def shrink(clip: Pixels, largest: int = LARGEST) -> Pixels:
    """Resize a clip for display, so that its longer side has between `SMALLEST` and `largest` pixels."""
    _, _, height, width = clip.shape
    longest = max(height, width)
    if longest < SMALLEST:  # an integer factor keeps pixels sharp
        factor = -(-SMALLEST // longest)
        return clip.repeat(factor, axis=2).repeat(factor, axis=3)
    if longest <= largest:
        return clip
    size = tuple(max(2, round(side * largest / longest)) for side in (width, height))
    resized = [np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in list_frames(clip)]
    return np.stack(resized).transpose(3, 0, 1, 2)


def list_frames(clip: Pixels) -> Pixels:
    """Return the frames of a clip: `[T, H, W, 3]`."""
    return np.ascontiguousarray(clip.transpose(1, 2, 3, 0))
