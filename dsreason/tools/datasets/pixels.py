"""Differences between the frames and sizes that the model sees in dsreason and in cosmos-rl, for `dsreason data inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsreason.data.chat import Encoder
from dsreason.data.media_plan import PlannedMedium
from dsreason.data.messages import list_media_parts
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.media import qwen_vl_utils
from dsreason.media.frames import describe_video_path
from dsreason.media.images import probe_image
from dsreason.media.qwen_vl_utils import Shown
from dsreason.media.videos import probe_video


def list_pixel_differences(encoder: Encoder, sample: Sample) -> list[str]:
    """Describe each media item of the sample for which qwen-vl-utils chooses different frames or a different size.

    Raises:
        DataError: a media item cannot be used.
    """
    parts, planned = list_media_parts(sample.messages), encoder.plan_media(sample)
    texts = (describe_difference(encoder, part, medium) for part, medium in zip(parts, planned, strict=True))
    return [text for text in texts if text]


def describe_difference(encoder: Encoder, part: Mapping[str, Any], planned: PlannedMedium) -> str | None:
    processor = encoder.processor.image_processor
    factor = processor.patch_size * processor.merge_size
    frames, height, width = planned.grid
    name = describe_video_path(planned.path)
    own_plan = Shown(*planned.size, frames * height * width // processor.merge_size**2, planned.indices)
    try:
        if planned.kind == "image":
            their_plan = qwen_vl_utils.fit_image(*probe_image(planned.path), part, factor)
        else:
            their_plan = qwen_vl_utils.fit_video(probe_video(planned.path), part, factor)
    except DataError as error:
        return f"{name}: {describe(own_plan)}; qwen-vl-utils {error}"
    if own_plan == their_plan:
        return None
    return (
        f"{name}: {describe(own_plan)}; qwen-vl-utils: {describe(their_plan)}{find_other_frame(own_plan, their_plan)}"
    )


def describe(shown: Shown) -> str:
    frames = f"{len(shown.indices)} frames of " if shown.indices else ""
    return f"{frames}{shown.width}x{shown.height} pixels, {shown.tokens} tokens"


def find_other_frame(planned: Shown, reference: Shown) -> str:
    """Describe the first frame that differs; return "" if the frames are equal or differ in number."""
    if len(planned.indices) != len(reference.indices) or planned.indices == reference.indices:
        return ""
    own_index, other = next(pair for pair in zip(planned.indices, reference.indices, strict=True) if pair[0] != pair[1])
    return f" (frame {own_index} in dsreason, {other} in qwen-vl-utils)"
