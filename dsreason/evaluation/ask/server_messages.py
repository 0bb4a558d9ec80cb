"""Conversion of a sample's messages to the format of OpenAI-compatible servers, with media embedded as data URLs.

With `server.video = "file"`, a clip is sent as a file, with the number of frames that vLLM should sample. vLLM has no settings
for parts of a clip or for sizes, and if all frames are to be used, some of its processors sample again; in these cases, the
frames are sampled in this module and sent in vLLM's format for a video of JPEGs. With "frames", the frames are sent as images,
for servers that do not support videos.
"""

from __future__ import annotations

import base64
import io
import mimetypes
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dsreason.data.media_plan import describe_video
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.families.qwen import build_vision_defaults
from dsreason.media import images, videos, vision
from dsreason.media.files import find_local_file
from dsreason.media.frames import describe_video_path

JPEG_QUALITY = 95
PIXELS = ("min_pixels", "max_pixels", "total_pixels")
OWN_SAMPLING = (*PIXELS, "video_start", "video_end")
"""Settings of a clip for which servers have no equivalent."""
# The server's model is unknown, so use Qwen2.5-VL's upper bounds; the server resizes all media anyway.
DEFAULTS = build_vision_defaults(bounds_are_per_video=False)
FRAME_LIMITS = vision.PixelLimits(factor=28, min_pixels=28**2, max_pixels=768 * 28**2)
IMAGE_LIMITS = vision.PixelLimits(factor=28, min_pixels=28**2, max_pixels=16384 * 28**2)

VideoForm = Literal["file", "frames"]
Part = dict[str, Any]


def build_request(sample: Sample, form: VideoForm) -> tuple[list[Message], dict[str, Any]]:
    """Build the messages, and additional request fields with vLLM's settings for reading clips (empty if not needed).

    Raises:
        DataError: a media item cannot be read, or the clips of a question need different settings, which a request does not
            allow.
    """
    messages: list[Message] = []
    readings: list[dict[str, Any]] = []
    for message in sample.messages:
        content = message["content"]
        if not isinstance(content, str):
            sent: list[Part] = []
            for part in content:
                if part["type"] == "video" and form == "file":
                    video, reading = to_video(part)
                    sent.append(video)
                    readings.append(reading)
                else:
                    sent += to_pictures(part)
            content = sent
        messages.append({"role": message["role"], "content": content})
    if any(reading != readings[0] for reading in readings):
        raise DataError(
            "the clips of this question need different frame settings, but a request has only one setting for all "
            'clips; set vision.nframes, or server.video = "frames"'
        )
    return messages, {"media_io_kwargs": {"video": readings[0]}} if readings else {}


def to_pictures(part: Part) -> list[Part]:
    """Convert a part: text is unchanged, an image becomes a PNG, and a clip becomes the JPEGs of its sampled frames."""
    if part["type"] == "text":
        return [{"type": "text", "text": part["text"]}]
    if part["type"] == "image":
        return [make_url_part("image", "image/png", to_base64(resize_image(part), "PNG"))]
    return [make_url_part("image", "image/jpeg", content) for content in encode_jpegs(part)]


def to_video(part: Part) -> tuple[Part, dict[str, Any]]:
    """Convert a clip to a part, and return it with vLLM's settings for reading it."""
    info, frame_choice = videos.probe_video(part["video"]), choose_frames(part)
    count = len(frame_choice.indices)
    if not info.is_frames and count < info.num_frames and all(part.get(key) is None for key in OWN_SAMPLING):
        path = find_local_file(part["video"])
        kind = mimetypes.guess_type(path.name)[0] or "video/mp4"
        # Which of these settings is used depends on vLLM's video loader for the model; fps = -1 disables the rate.
        reading = {"num_frames": count, "fps": -1, "min_frames": count, "max_frames": count}
        return make_url_part("video", kind, base64.b64encode(path.read_bytes())), reading
    sequence = b",".join(encode_jpegs(part))
    metadata = describe_video(info, frame_choice)
    return make_url_part("video", "video/jpeg", sequence), {
        "num_frames": -1,
        "fps": metadata["fps"],
        "frames_indices": metadata["frames_indices"],
        "total_num_frames": max(metadata["total_num_frames"], count),  # a single frame is repeated
        "duration": info.duration,
        "do_sample_frames": False,
    }


def choose_frames(part: Part) -> vision.FrameChoice:
    info = videos.probe_video(part["video"])
    try:
        return vision.sample_frames(info, part, DEFAULTS)
    except DataError as error:
        raise DataError(f"{describe_video_path(part['video'])}: {error}") from error


def encode_jpegs(part: Part) -> list[bytes]:
    """Encode the sampled frames of a clip as base64 JPEGs, downscaled if they have more pixels than Qwen2.5-VL would use."""
    indices, info = choose_frames(part).indices, videos.probe_video(part["video"])
    size = vision.compute_video_size(info.height, info.width, len(indices), part, FRAME_LIMITS, DEFAULTS)
    fits = info.height * info.width <= size[0] * size[1] and part.get("min_pixels") is None
    frames: NDArray[np.uint8] = videos.load_video(part["video"], indices, size=None if fits else size)
    return [to_base64(Image.fromarray(frame), "JPEG", quality=JPEG_QUALITY) for frame in frames]


def resize_image(part: Part) -> Image.Image:
    image = images.load_image(part["image"])
    if all(part.get(key) is None for key in PIXELS):
        return image
    height, width = vision.compute_image_size(image.height, image.width, part, IMAGE_LIMITS)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def to_base64(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return base64.b64encode(buffer.getvalue())


def make_url_part(medium: Literal["image", "video"], kind: str, content: bytes) -> Part:
    return {"type": f"{medium}_url", f"{medium}_url": {"url": f"data:{kind};base64,{content.decode()}"}}
