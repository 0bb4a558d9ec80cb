"""A sample's messages in the form that OpenAI-compatible servers take, its media inside as data URLs.

A clip is sent in one of two forms. `file`: the file itself, which the server samples; how many frames it shall take is said
in vLLM's fields of the request. `frames`: the sampled frames as JPEG pictures, for servers that take no videos.
"""

from __future__ import annotations

import base64
import io
import mimetypes
from typing import Any, Literal

from PIL import Image

from dsreason.data import media, vision
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

JPEG_QUALITY = 95
PIXELS = frozenset(("min_pixels", "max_pixels", "total_pixels"))
RANGE = frozenset(("video_start", "video_end"))
# The server's model is unknown. These are Qwen2.5-VL's bounds; the server's own processor resizes what it gets anyway.
FRAME_LIMITS = vision.PixelLimits(factor=28, min_pixels=128 * 28**2, max_pixels=768 * 28**2)
IMAGE_LIMITS = vision.PixelLimits(factor=28, min_pixels=4 * 28**2, max_pixels=16384 * 28**2)

VideoForm = Literal["file", "frames"]
Part = dict[str, Any]


def as_request(sample: Sample, video: VideoForm) -> tuple[list[Message], dict[str, Any]]:
    """The messages, and the fields beside them that say how many frames of a clip to take (empty without a clip).

    Raises:
        DataError: a medium cannot be read, or has a setting that the server cannot be told.
    """
    messages: list[Message] = []
    clips: list[Part] = []
    for message in sample.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [sent for part in content for sent in as_sent(part, video)]
            clips += [part for part in message["content"] if part["type"] == "video"]
        messages.append({"role": message["role"], "content": content})
    return messages, frame_fields(clips) if video == "file" else {}


def as_sent(part: Part, video: VideoForm) -> list[Part]:
    if part["type"] == "text":
        return [{"type": "text", "text": part["text"]}]
    if part["type"] == "image":
        return [picture(sized_image(part), "PNG")]
    if video == "frames":
        return [picture(Image.fromarray(frame), "JPEG", quality=JPEG_QUALITY) for frame in sized_frames(part)]
    path = media.local_path(part["video"])
    if impossible := sorted((PIXELS | RANGE) & {key for key, value in part.items() if value is not None}):
        raise DataError(
            f'{path}: {", ".join(impossible)} cannot be told to the server when it gets the file; set server.video = "frames"'
        )
    kind = mimetypes.guess_type(path.name)[0] or "video/mp4"
    return [{"type": "video_url", "video_url": {"url": data_url(path.read_bytes(), kind)}}]


def frame_fields(clips: list[Part]) -> dict[str, Any]:
    """vLLM's fields with which its readers take as many frames as training would, and its processors no fewer.

    DataError where the clips of one question need different numbers: the fields are for all of them.
    """
    if not clips:
        return {}
    counts = {len(chosen_frames(clip).indices): clip["video"] for clip in clips}
    if len(counts) > 1:
        listed = ", ".join(f"{count} of {path}" for count, path in counts.items())
        raise DataError(
            f"the clips need different numbers of frames ({listed}), and the server can be told one; "
            'set vision.nframes, or server.video = "frames"'
        )
    (count,) = counts
    # Which of these counts depends on the model's reader. A rate of -1 leaves the number to the others.
    reader = {"num_frames": count, "fps": -1, "min_frames": count, "max_frames": count}
    return {"media_io_kwargs": {"video": reader}, "mm_processor_kwargs": {"do_sample_frames": False}}


def chosen_frames(part: Part) -> vision.FrameChoice:
    try:
        return vision.sample_frames(media.probe_video(part["video"]), part)
    except DataError as error:
        raise error if str(part["video"]) in str(error) else DataError(f"{part['video']}: {error}") from error


def sized_frames(part: Part) -> Any:
    """The sampled frames, uint8 [N, H, W, 3], of the size in which Qwen2.5-VL would see them."""
    chosen = chosen_frames(part).indices
    info = media.probe_video(part["video"])
    size = vision.video_size(info.height, info.width, len(chosen), part, FRAME_LIMITS)
    return media.load_video(part["video"], chosen, size=size)


def sized_image(part: Part) -> Image.Image:
    image = media.load_image(part["image"])
    if not any(part.get(key) is not None for key in PIXELS):
        return image
    height, width = vision.image_size(image.height, image.width, part, IMAGE_LIMITS)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def picture(image: Image.Image, form: str, **options: Any) -> Part:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return {"type": "image_url", "image_url": {"url": data_url(buffer.getvalue(), f"image/{form.lower()}")}}


def data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
