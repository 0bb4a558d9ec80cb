"""Conversion of a sample's messages to the format of OpenAI-compatible servers, with media embedded as data URLs.

With `server.video = "file"`, a clip is sent as a video that shows the same frames as in training. By itself, vLLM would choose
different frames: for Qwen2.5-VL, frames 0, 37, 75 and 112 of 150 instead of 0, 50, 99 and 149. If the frames keep their size,
the file itself is sent, with settings that make vLLM choose the same frames as training. Parts of a clip and resized frames are
sent in vLLM's format for a video that consists of JPEGs. With "frames", the frames are sent as images, for servers that do not
support videos.
"""

from __future__ import annotations

import base64
import io
import mimetypes
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from PIL import Image

from dsreason.data.chat import Encoder
from dsreason.data.media_plan import PlannedMedium, describe_video, load_medium
from dsreason.data.messages import list_media_parts
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.families.qwen import build_vision_defaults
from dsreason.media import images, videos, vision
from dsreason.media.files import find_local_file
from dsreason.media.frames import describe_video_path

JPEG_QUALITY = 95
PIXELS = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
# For unknown models, use Qwen2.5-VL's upper bounds; the server resizes all media anyway.
DEFAULTS = build_vision_defaults(bounds_are_per_video=False)
FRAME_LIMITS = vision.PixelLimits(factor=28, min_pixels=28**2, max_pixels=768 * 28**2)
IMAGE_LIMITS = vision.PixelLimits(factor=28, min_pixels=28**2, max_pixels=16384 * 28**2)
LOADER = "qwen3_vl"
"""vLLM's video loader that spaces frames evenly from the first to the last, as in training; it works for all models."""
MOST_LOADER_FRAMES = 768

VideoForm = Literal["file", "frames"]
Part = dict[str, Any]


def build_request(
    sample: Sample, form: VideoForm, encoder: Encoder | None = None
) -> tuple[list[Message], dict[str, Any]]:
    """Build the messages, and additional request fields with vLLM's settings for reading clips ({} if not needed).

    `encoder` is the encoder for the server's model; if it is None, the server chooses the sizes.

    Raises:
        DataError: a media item cannot be read, or a question's clips need different settings, which a request does not allow.
    """
    planned = iter(plan_for_unknown_model(sample) if encoder is None else encoder.plan_media(sample))
    messages: list[Message] = []
    readings: list[dict[str, Any]] = []
    for message in sample.messages:
        content = message["content"]
        if not isinstance(content, str):
            sent: list[Part] = []
            for part in content:
                if part["type"] == "text":
                    sent.append({"type": "text", "text": part["text"]})
                elif part["type"] == "video" and form == "file":
                    video, reading = to_video(next(planned))
                    sent.append(video)
                    readings.append(reading)
                else:
                    sent += to_pictures(next(planned))
            content = sent
        messages.append({"role": message["role"], "content": content})
    if any(reading != readings[0] for reading in readings):
        raise DataError(
            "the clips of this question need different frame settings, but a request has only one setting for all "
            'clips; set vision.nframes, or server.video = "frames"'
        )
    if not readings:
        return messages, {}
    fields: dict[str, Any] = {"media_io_kwargs": {"video": readings[0]}}
    return messages, fields if encoder is None else fields | {"mm_processor_kwargs": {"do_resize": False}}


def plan_for_unknown_model(sample: Sample) -> Iterator[PlannedMedium]:
    """Plan media without the model's processor. Media keep their sizes, unless the settings or Qwen2.5-VL's bounds do not allow
    them."""
    for part in list_media_parts(sample.messages):
        path, has_pixels = str(part[part["type"]]), any(part.get(key) is not None for key in PIXELS)
        if part["type"] == "image":
            size = images.probe_image(path)
            if has_pixels:
                size = vision.compute_image_size(*size, part, IMAGE_LIMITS)
            yield PlannedMedium("image", path, size, (1, 1, 1))
            continue
        info = videos.probe_video(path)
        try:
            frame_choice = vision.sample_frames(info, part, DEFAULTS)
            count = len(frame_choice.indices)
            size = vision.compute_video_size(info.height, info.width, count, part, FRAME_LIMITS, DEFAULTS)
        except DataError as error:
            raise DataError(f"{describe_video_path(path)}: {error}") from error
        is_larger = info.height * info.width <= size[0] * size[1]
        if is_larger and all(part.get(key) is None for key in ("min_pixels", "resized_height")):
            size = info.height, info.width
        metadata = describe_video(info, frame_choice)
        yield PlannedMedium("video", path, size, (1, 1, 1), frame_choice.indices, metadata)


def to_pictures(medium: PlannedMedium) -> list[Part]:
    """Convert an image to a PNG, and a clip to the JPEGs of its sampled frames."""
    if medium.kind == "image":
        image = load_medium(medium, "pyav")
        assert isinstance(image, Image.Image)
        return [make_url_part("image", "image/png", to_base64(image, "PNG"))]
    return [make_url_part("image", "image/jpeg", content) for content in encode_jpegs(medium)]


def to_video(medium: PlannedMedium) -> tuple[Part, dict[str, Any]]:
    """Convert a clip to a message part, and return it with vLLM's settings for reading the clip."""
    info, count = videos.probe_video(medium.path), len(medium.indices)
    if medium.size == (info.height, info.width) and medium.indices == choose_like_loader(info, count):
        path = find_local_file(medium.path)
        kind = mimetypes.guess_type(path.name)[0] or "video/mp4"
        # fps = -1 disables rate-based sampling, so the bounds determine the number of frames.
        reading = {"video_backend": LOADER, "num_frames": count, "fps": -1, "min_frames": count, "max_frames": count}
        return make_url_part("video", kind, base64.b64encode(path.read_bytes())), reading
    facts = medium.metadata
    reading = {key: facts[key] for key in ("fps", "frames_indices", "duration", "do_sample_frames")}
    # `count` exceeds `total_num_frames` if a clip's only frame was repeated.
    reading |= {"num_frames": -1, "total_num_frames": max(facts["total_num_frames"], count)}
    return make_url_part("video", "video/jpeg", b",".join(encode_jpegs(medium))), reading


def choose_like_loader(info: vision.VideoInfo, count: int) -> tuple[int, ...] | None:
    """Return the frames that vLLM's `LOADER` would choose; None if it cannot be used, as for clips given as image files."""
    if info.is_frames or count >= info.num_frames or count > MOST_LOADER_FRAMES:
        return None
    return tuple(np.linspace(0, info.num_frames - 1, count).round().astype(int).tolist())


def encode_jpegs(medium: PlannedMedium) -> list[bytes]:
    """Encode a clip's sampled frames, at their planned size, as base64 JPEGs."""
    frames = videos.load_video(medium.path, medium.indices, size=medium.size)
    return [to_base64(Image.fromarray(frame), "JPEG", quality=JPEG_QUALITY) for frame in frames]


def to_base64(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return base64.b64encode(buffer.getvalue())


def make_url_part(medium: Literal["image", "video"], kind: str, content: bytes) -> Part:
    return {"type": f"{medium}_url", f"{medium}_url": {"url": f"data:{kind};base64,{content.decode()}"}}
