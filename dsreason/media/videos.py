"""Functions that read videos stored as files or as frames: frame counts, rates, sizes and uint8 RGB frames.

Unusable videos raise a `DataError`.
"""

from __future__ import annotations

import importlib
import shlex
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from dsreason.errors import ConfigError, DataError
from dsreason.media.files import OTHER_FORMATS, VIDEO_FORMATS, find_local_file
from dsreason.media.frames import is_frame_list, iter_frame_pixels, probe_frames
from dsreason.media.time_limit import check_time, get_size_on_disk, time_limit
from dsreason.media.vision import MAX_IMAGE_PIXELS, VideoInfo

MAX_VIDEO_FRAMES = 2_000_000
"""Maximum number of frames in a video (18 hours at 30 fps). Files whose headers claim more are rejected as well."""
DECODED_PIXELS_PER_BYTE, FEWEST_DECODED_PIXELS = 50_000, 10_000_000_000
"""Maximum number of decoded pixels per byte of a video file, and the lowest limit in pixels, which applies to small files. Frames
that are decoded only on the way to a requested frame count too. A still scene has a few thousand pixels per byte, and a black
scene 30,000, in H.264; in newer codecs, a megabyte may take hours to decode."""
MAX_UNUSABLE_PACKETS = 10_000
"""Number of packets at the start of a video to try until one can be decoded on its own."""
RAW_STREAMS = ("h264", "hevc")
"""FFmpeg's names for raw formats, which have no container and do not support seeking."""
SEEK_FROM_FRAME = 128
"""Minimum index of the first requested frame from which the reader seeks to the preceding key frame instead of decoding from the
start."""
MAX_REORDERING = 32
"""Number of packets to read beyond a frame. Codecs reorder frames by at most 16 packets; the number is doubled to be safe."""


def probe_video(path: str | Path) -> VideoInfo:
    """Return the frame count, frame rate and size of the first video stream. The result is cached until the file changes.

    The count is the number of frames that decoding yields. The header's count is trusted if it agrees with the index;
    otherwise, the packets are counted, without decoding them. One frame is decoded, because PyAV reports the rotation only for
    frames, not for streams.
    """
    if is_frame_list(path):
        return probe_frames(str(path))
    file = find_local_file(path)
    status = file.stat()
    return _probe_cached(file.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=65536)
def _probe_cached(file: Path, modified: int, size: int) -> VideoInfo:
    with _bound_video_time(file), open_video(file) as (container, stream):
        if _is_header_exact(file, size, stream):
            num_frames, fps = stream.frames, float(stream.average_rate or 0)
        else:
            num_frames, times = read_packet_times(container, stream)
            fps = _compute_frame_rate(stream, times)
            container.seek(0)
        if not 0 < num_frames <= MAX_VIDEO_FRAMES:
            raise DataError(
                f"{file}: has {num_frames} video frames; the number must be between 1 and {MAX_VIDEO_FRAMES}"
            )
        if fps <= 0:
            raise DataError(f"{file}: the frame rate cannot be determined from the header or the {num_frames} frames")
        stream.codec_context.thread_count = 1  # starting threads takes longer than decoding one frame
        first = _decode_any_frame(container, stream)
        if first is None:
            raise DataError(
                f"{file}: none of its first {min(num_frames, MAX_UNUSABLE_PACKETS)} video frames can be decoded"
            )
        sideways = _count_quarter_turns(first) % 2
        height, width = (first.width, first.height) if sideways else (first.height, first.width)
        return VideoInfo(num_frames, fps, height, width, num_frames / fps)


def load_video(
    path: str | Path,
    indices: Sequence[int],
    *,
    size: tuple[int, int] | None = None,
    decoder: Literal["pyav", "torchcodec"] = "pyav",
) -> NDArray[np.uint8]:
    """Load the frames at `indices` (presentation order from 0, ascending, repeats allowed) as uint8 [N, H, W, 3].

    If `size` (height, width) is set, each frame is resized as soon as it is decoded (antialiased bicubic, as in the Hugging
    Face video processors), so the full-size frames are never in memory all at once.
    """
    if not indices or min(indices) < 0 or list(indices) != sorted(indices):
        raise ValueError(f"frame indices must be ascending and not negative; got {list(indices)}")
    wanted_indices = sorted(set(indices))
    frames = _load_frames(path, wanted_indices, size, decoder)
    row_of = {index: row for row, index in enumerate(wanted_indices)}
    stacked = np.stack(frames)
    return stacked if len(wanted_indices) == len(indices) else stacked[[row_of[index] for index in indices]]


def _load_frames(
    path: str | Path, wanted_indices: list[int], size: tuple[int, int] | None, decoder: Literal["pyav", "torchcodec"]
) -> list[NDArray[np.uint8]]:
    if is_frame_list(path):
        pixels = iter_frame_pixels(str(path), wanted_indices)
        return [frame if size is None else resize_frames(frame, size) for frame in pixels]
    file = find_local_file(path)
    if decoder == "torchcodec":
        with _bound_video_time(file):
            return _load_torchcodec_frames(file, wanted_indices, size)
    with _bound_video_time(file), convert_ffmpeg_errors(file):  # the conversion to RGB also raises FFmpeg's errors
        try:
            return [_to_array(frame, size) for frame in iter_frames_by_time(file, wanted_indices)]
        except UnusableTimes:
            return [_to_array(frame, size) for frame in iter_frames_by_count(file, wanted_indices)]


def resize_frames(frames: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize uint8 frames [..., H, W, 3] to (height, width) with antialiased bicubic interpolation, if the size differs."""
    if frames.shape[-3:-1] == size:
        return frames
    channels_first = torch.from_numpy(frames).movedim(-1, -3)
    resized: torch.Tensor = tvf.resize(
        channels_first, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    return resized.movedim(-3, -1).contiguous().numpy()


def count_codec_threads() -> int:
    """Return the number of decoder threads: 1 outside the main thread, because loader threads already run in parallel."""
    return torch.get_num_threads() if threading.current_thread() is threading.main_thread() else 1


def _bound_video_time(file: Path) -> AbstractContextManager[None]:
    return time_limit(file, own_threads=count_codec_threads() > 1)


@contextmanager
def convert_ffmpeg_errors(file: Path) -> Iterator[None]:
    """Convert FFmpeg's errors in the block to a DataError that names the file."""
    try:
        yield
    except av.ArgumentError as error:
        raise DataError(
            f"{file}: is not a usable video: it is damaged, or not in one of the containers {', '.join(VIDEO_FORMATS)}"
        ) from error
    except av.FFmpegError as error:
        raise DataError(f"{file}: is not a usable video: {error.strerror}") from error


@contextmanager
def open_video(file: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its first video stream. Raise DataError if it is not a video, or if the block finds it damaged."""
    # A disguised playlist must not make FFmpeg open or download anything else.
    allowed = {"protocol_whitelist": "file", "format_whitelist": ",".join((*VIDEO_FORMATS, *OTHER_FORMATS))}
    with (
        convert_ffmpeg_errors(file),
        av.open(str(file.absolute()), metadata_errors="ignore", options=allowed) as container,
    ):
        if not container.streams.video:
            raise DataError(f"{file}: has no video stream (container {container.format.name})")
        if container.format.name.endswith("_pipe") or container.format.name == "image2":
            raise DataError(f"{file}: is an image ({container.format.name}), not a video; pass it as an image")
        if container.format.name in RAW_STREAMS:
            raise DataError(
                f"{file}: is a raw {container.format.name} stream, whose frames have no times; put it into a container: "
                f"ffmpeg -i {shlex.quote(file.name)} -c copy {shlex.quote(file.stem + '.mp4')}"
            )
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise DataError(f"{file}: no decoder is available for its video stream; convert it, for example to H.264")
        if stream.frames > MAX_VIDEO_FRAMES:
            raise DataError(f"{file}: claims to have {stream.frames} frames, but the maximum is {MAX_VIDEO_FRAMES}")
        if stream.width * stream.height > MAX_IMAGE_PIXELS:
            raise DataError(
                f"{file}: has frames of {stream.width}x{stream.height} pixels, but the maximum is {MAX_IMAGE_PIXELS} "
                "pixels"
            )
        stream.codec_context.options = {"max_pixels": str(MAX_IMAGE_PIXELS)}  # a later frame may be larger
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = count_codec_threads()
        yield container, stream


def _decode_any_frame(container: InputContainer, stream: VideoStream) -> VideoFrame | None:
    """Return the first frame that can be decoded on its own, or None.

    Flushing makes the decoder return a packet's frame before it reads more packets.
    """
    for packet in islice(container.demux(stream), MAX_UNUSABLE_PACKETS):
        check_time()
        if packet.size and (frames := packet.decode() or stream.codec_context.decode(None)):
            return frames[0]
        stream.codec_context.flush_buffers()
    return None


def _is_header_exact(file: Path, size: int, stream: VideoStream) -> bool:
    """Return whether the header's frame count equals the number of index entries, and no edit list discards any of them."""
    if (
        stream.frames == 0 or not stream.average_rate or not hasattr(stream, "index_entries")
    ):  # PyAV < 18 does not expose the index
        return False
    num_shown, end = 0, 0
    for entry in stream.index_entries:
        num_shown += not entry.is_discard
        end = max(end, entry.pos + entry.size)
    if end > size:
        raise DataError(
            f"{file}: the file is truncated: its index reaches byte {end}, but the file ends at byte {size}"
        )
    return num_shown == stream.frames == len(stream.index_entries)


def _compute_frame_rate(stream: VideoStream, times: Sequence[int]) -> float:
    """Return the header's frame rate if the packets' `times` agree with it up to rounding, otherwise the rate of the times.

    Matroska rounds times to milliseconds. By the rounded times, 180 frames at 60 fps would take 2.9997 s, and sampling at 2 fps
    would yield 4 frames instead of 6.
    """
    rate, unit = stream.average_rate, stream.time_base
    if len(times) < 2 or not unit:
        return float(rate or 0)
    steps, seconds = len(times) - 1, (times[-1] - times[0]) * unit
    if rate and abs(steps / rate - seconds) <= unit:
        return float(rate)
    return float(steps / seconds)


def read_packet_times(
    container: InputContainer, stream: VideoStream, most: int = MAX_VIDEO_FRAMES
) -> tuple[int, list[int]]:
    """Return the number of frames that decoding yields, and their sorted times in units of the stream's time base.

    The list of times is empty unless all times are known and distinct. Reading stops once more than `most` frames are counted.
    """
    count, times = 0, set()
    for number, packet in enumerate(container.demux(stream)):
        if number % 128 == 0:
            check_time()
        if packet.size and not packet.is_discard:
            count += 1
            if packet.pts is not None:
                times.add(packet.pts)
            if count > most:
                break
    return count, sorted(times) if len(times) == count else []


class UnusableTimes(Exception):
    """Raised if frames cannot be found by their packets' times."""


def iter_frames_by_count(file: Path, indices: Sequence[int]) -> Iterator[VideoFrame]:
    """Yield the frames at the ascending `indices`, decoding all frames before them."""
    index, wanted_indices = -1, set(indices)
    with open_video(file) as (container, stream):
        for index, frame in enumerate(_bound_work(file, _decode_frames(container, stream))):
            if index in wanted_indices:
                if frame.is_corrupt:
                    raise DataError(f"{file}: frame {index} is damaged")
                yield frame
            if index >= indices[-1]:
                return
    raise DataError(
        f"{file}: frame {indices[-1]} is needed, but only {index + 1} frames can be decoded; the file is damaged or "
        "truncated"
    )


def iter_frames_by_time(file: Path, indices: Sequence[int], times: Sequence[int] = ()) -> Iterator[VideoFrame]:
    """Yield the frames at the ascending `indices`, decoding from the key frame before the first one.

    `times` are the packet times from `read_packet_times`; if empty, they are read from the file.

    Raises:
        UnusableTimes: some of the requested frames cannot be found by the packets' times.
    """
    with open_video(file) as (container, stream):
        if not times:
            _, times = read_packet_times(container, stream, indices[-1] + MAX_REORDERING)
        if indices[-1] >= len(times):
            raise UnusableTimes
        remaining_times = deque(times[index] for index in indices)
        if indices[0] >= SEEK_FROM_FRAME:
            container.seek(remaining_times[0], stream=stream)
        else:
            container.seek(0)
        for frame in _bound_work(file, _decode_frames(container, stream, set(remaining_times))):
            if frame.pts == remaining_times[0] and not frame.is_corrupt:
                remaining_times.popleft()
                yield frame
                if not remaining_times:
                    return
            elif frame.pts is None or frame.pts >= remaining_times[0]:
                break
    raise UnusableTimes


def _decode_frames(
    container: InputContainer, stream: VideoStream, chosen: Collection[int] = ()
) -> Iterator[VideoFrame]:
    """Yield the frames from the current position on. If `chosen` (times) is set, frames that are not needed may be skipped.

    A frame is skipped if it is not chosen and no other frame depends on it. This is done only for H.264, which marks reference
    frames reliably (`nal_ref_idc`); in HEVC, higher layers may refer to unmarked frames.
    """
    can_skip = bool(chosen) and stream.codec_context.name == "h264"
    for packet in container.demux(stream):
        check_time()
        stream.codec_context.skip_frame = "NONREF" if can_skip and packet.pts not in chosen else "DEFAULT"
        yield from packet.decode()


def _bound_work(file: Path, frames: Iterator[VideoFrame]) -> Iterator[VideoFrame]:
    """Yield the frames; raise DataError once the number of decoded pixels exceeds the limit for the file's size."""
    size, decoded = get_size_on_disk(file), 0
    most = max(DECODED_PIXELS_PER_BYTE * size, FEWEST_DECODED_PIXELS)
    for frame in frames:
        decoded += frame.width * frame.height
        if decoded > most:
            raise DataError(
                f"{file}: {decoded:.1e} pixels would be decoded, but the limit for a file of {size} bytes is "
                f"{most:.1e}; save it with smaller frames or more key frames"
            )
        yield frame


def _to_array(frame: VideoFrame, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    array: NDArray[Any] = frame.to_ndarray(format="rgb24")
    if turns := _count_quarter_turns(frame):
        array = np.ascontiguousarray(np.rot90(array, turns))
    return array if size is None else resize_frames(array, size)


def _count_quarter_turns(frame: VideoFrame) -> int:
    """Return the number of counter-clockwise quarter turns that make the frame upright, rounded from its display matrix."""
    return round(frame.rotation / 90) % 4


def check_torchcodec() -> None:
    """Raise ConfigError if torchcodec or its FFmpeg libraries are missing."""
    with suppress(RuntimeError, ValueError):  # the empty bytes are not a video
        open_with_torchcodec(b"")


def open_with_torchcodec(source: str | bytes) -> Any:
    """Open a video with torchcodec. Raise ConfigError if torchcodec or its FFmpeg libraries are missing."""
    try:
        decoders = importlib.import_module("torchcodec.decoders")
        return decoders.VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=count_codec_threads())
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, RuntimeError) and "libtorchcodec" not in str(error):
            raise
        raise ConfigError(
            f'data.video_decoder = "torchcodec" cannot be used ({str(error).strip().splitlines()[0]}); install '
            'torchcodec and FFmpeg, or set data.video_decoder = "pyav"'
        ) from error


def _load_torchcodec_frames(file: Path, indices: list[int], size: tuple[int, int] | None) -> list[NDArray[np.uint8]]:
    try:
        frames = open_with_torchcodec(str(file)).get_frames_at(indices=indices).data.numpy()
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(f"{file}: is not a usable video: {error}") from error
    return list(frames if size is None else resize_frames(frames, size))
