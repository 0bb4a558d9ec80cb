"""Qwen2.5-VL (Cosmos-Reason1): a video is one run of placeholders whose temporal index counts real time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsreason.models import media_once
from dsreason.models.mrope import Grid, Grids, install, merged_grids, sample_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VISION_TOWER = "model.visual"
RENAMES = (
    (r"^visual\.", "model.visual."),
    (r"^model\.(?!visual\.|language_model\.)", "model.language_model."),
)
"""Names in published checkpoints → names in memory (checkpoints that already have the latter match neither)."""


def grids(mm_kwargs: dict[str, Any], config: Any) -> Grids:
    """Images as they are; two temporal steps of a video are `second_per_grid_ts * tokens_per_second` apart (1 s where
    the processor gives no time).

    Source: `iter_mm_grid_thw` of vLLM's qwen2_5_vl.py. vLLM casts every floating processor output, the seconds
    included, to the model's dtype before it multiplies in float64, so we round alike: in bfloat16 0.925 s is 0.92578.
    """
    vision = config.vision_config
    images = merged_grids(mm_kwargs.get("image_grid_thw"), vision.spatial_merge_size)
    videos = merged_grids(mm_kwargs.get("video_grid_thw"), vision.spatial_merge_size)
    seconds = mm_kwargs.get("second_per_grid_ts")
    if seconds is None:
        return images, [video._replace(time_step=1.0 * vision.tokens_per_second) for video in videos]
    rounded = torch.as_tensor(seconds, dtype=torch.float32).to(config.dtype or torch.float32).tolist()
    steps = (s * vision.tokens_per_second for s in rounded)
    return images, [Grid(*video[:3], step) for video, step in zip(videos, steps, strict=True)]


def position_ids(mm_token_type_ids: Tensor, mm_kwargs: dict[str, Tensor], config: Any) -> Tensor:
    """Positions `[3, T]` of one sample: text counts on all axes alike, a medium adds its grid to where the text
    stopped, and the text after it continues from the largest index of all three axes + 1.

    Source: `get_mrope_input_positions` of vLLM's qwen2_5_vl.py, which keeps the rule of the model's original code.
    `mm_kwargs` are those of this sample; `config` is the model's (for bfloat16 see `grids`).
    """
    return sample_positions(mm_token_type_ids, grids(mm_kwargs, config))


def patch(model: PreTrainedModel) -> None:
    install(model, grids)
    media_once.install(model.model.visual)
