"""Functions that write small videos whose frames show their number in their pixels."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

MILLISECONDS = Fraction(1, 1000)


def number_frame(number: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Draw the bits of `number` as black bars from left to right on a white background."""
    frame = np.full((height, width, 3), 255, np.uint8)
    for bit in range(8):
        if number >> bit & 1:
            frame[:, bit * width // 8 : (bit + 1) * width // 8] = 0
    return frame


def read_number(frame: np.ndarray) -> int:
    height, width = frame.shape[:2]
    return sum(1 << bit for bit in range(8) if frame[height // 2, (2 * bit + 1) * width // 16, 0] < 128)


def write_video(
    path: Path,
    times: Sequence[int] | int = 12,
    *,
    rotation: float = 0.0,
    gop: int = 12,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    frames: Iterable[np.ndarray] | None = None,
    drop_before: int | None = None,
    rate: int = 10,
) -> Path:
    """Frames shown at `times` (milliseconds; an int: that many, 100 ms apart). `drop_before` writes an edit list that
    hides the frames before that time, as cutting without re-encoding does. `rate` is what the header says."""
    times = range(0, 100 * times, 100) if isinstance(times, int) else times
    frames = [number_frame(i) for i in range(len(times))] if frames is None else list(frames)
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.time_base = stream.time_base = MILLISECONDS
        if rotation:
            stream.set_display_rotation(rotation)
        packets = []
        for time, array in zip(times, frames, strict=True):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts, frame.time_base = time, MILLISECONDS
            packets += stream.encode(frame)
        packets += stream.encode()
        for packet in packets:
            if drop_before:
                shift = int(drop_before * Fraction(1, 1000) / packet.time_base)
                packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
            container.mux(packet)
    return path
