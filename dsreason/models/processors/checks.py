"""Checks of a processor's settings, which run before rows are encoded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin

from dsreason.errors import CheckpointError
from dsreason.media.vision import MAX_IMAGE_PIXELS, MAX_SETTING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PATCH = 64
"""Upper limit for a patch's side in pixels, the patches merged per side, and the frames per patch; real models have 2 to 16."""


def check_length(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    if not is_above(tokenizer.model_max_length, 0):
        raise CheckpointError(
            f"{path}: tokenizer_config.json has model_max_length {tokenizer.model_max_length!r:.100}, but it must be a number "
            "above 0"
        )


def check_chat_template(path: Path, holder: ProcessorMixin | PreTrainedTokenizerBase) -> None:
    if not isinstance(holder.chat_template, str):
        raise CheckpointError(
            f"{path}: the chat template is missing; copy the original model's chat_template.jinja (or .json) to this folder"
        )


def check_patches(path: Path, processor: Any, vision: Any, temporal_patch_size: int) -> None:
    """Raise CheckpointError if a processor's sizes are impossible, or differ from the patch sizes that the model expects."""
    expected = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": temporal_patch_size,
    }
    for media in (processor.image_processor, processor.video_processor):
        for name, value in expected.items():
            media_value = media.to_dict().get(name)
            if media_value != value:
                raise CheckpointError(
                    f"{path}: {type(media).__name__} has {name} {media_value}, but config.json has {value}; "
                    "copy the processor files of the same model to this folder"
                )
            if type(media_value) is not int or not 1 <= media_value <= MAX_PATCH:
                raise CheckpointError(
                    f"{path}: {type(media).__name__} has {name} {media_value!r:.100}, but it must be an integer from 1 "
                    f"to {MAX_PATCH}"
                )
        check_scaling(path, media)
        for name, most in (("shortest_edge", MAX_IMAGE_PIXELS), ("longest_edge", MAX_SETTING)):
            value = dict(media.size).get(name)
            if not isinstance(value, int | float) or not 1 <= value <= most:
                raise CheckpointError(
                    f"{path}: {type(media).__name__} has size.{name} {value!r:.100}, but it must be a number of pixels from "
                    f"1 to {most}"
                )


def check_scaling(path: Path, media: Any) -> None:
    """Raise CheckpointError if a mean, standard deviation or factor with which pixels are scaled is not a valid number."""
    for name, least in (("image_mean", -math.inf), ("image_std", 0.0)):
        values = media.to_dict().get(name)
        numbers = values if isinstance(values, list | tuple) else [values] * 3
        if media.do_normalize and not (len(numbers) == 3 and all(is_above(number, least) for number in numbers)):
            raise CheckpointError(
                f"{path}: {type(media).__name__} has {name} {values!r:.100}, but it must be three numbers"
                + (" above 0" if least == 0 else "")
            )
    factor = media.to_dict().get("rescale_factor")
    if media.do_rescale and not is_above(factor, 0):
        raise CheckpointError(
            f"{path}: {type(media).__name__} has rescale_factor {factor!r:.100}, but it must be a number above 0"
        )


def is_above(value: Any, least: float) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > least
