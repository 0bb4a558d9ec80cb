"""Qwen3-VL (Cosmos-Reason2): every group of frames is a run of placeholders of its own, after its time as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from dsreason.models import media_once
from dsreason.models.mrope import Grids, install, merged_grids, sample_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VISION_TOWER = "model.visual"
RENAMES: tuple[tuple[str, str], ...] = ()
"""Published checkpoints have the names of the model in memory."""


def grids(mm_kwargs: dict[str, Any], config: Any) -> Grids:
    """One grid per image and per group of video frames; real time is in the text (`<1.5 seconds>`), not in the index.

    Source: `_iter_mm_grid_hw` of vLLM's qwen3_vl.py.
    """
    merge_size = config.vision_config.spatial_merge_size
    images = merged_grids(mm_kwargs.get("image_grid_thw"), merge_size)
    videos = merged_grids(mm_kwargs.get("video_grid_thw"), merge_size)
    return images, [video._replace(frames=1) for video in videos for _ in range(video.frames)]


def position_ids(mm_token_type_ids: Tensor, mm_kwargs: dict[str, Tensor], config: Any) -> Tensor:
    """Positions `[3, T]` of one sample: text counts on all axes alike, an image or group of frames adds its grid to
    where the text stopped, and the text after it continues from the largest index of all three axes + 1.

    Source: `_get_mrope_input_positions` of vLLM's qwen3_vl.py. `mm_kwargs` are those of this sample.
    """
    return sample_positions(mm_token_type_ids, grids(mm_kwargs, config))


def patch(model: PreTrainedModel) -> None:
    install(model, grids)
    media_once.install(model.model.visual)
