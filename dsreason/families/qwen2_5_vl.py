"""The Qwen2.5-VL family (also Cosmos-Reason1): a video is one run of placeholders, whose temporal index measures real time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsreason.families.family import Family, Grid, Grids, Tiny, merge_grids
from dsreason.families.qwen import MODULES, TOKENS, build_vision_defaults

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


def build_grids(mm_kwargs: dict[str, Any], config: Any) -> Grids:
    """Return the grids of all media. Consecutive time steps of a video are `second_per_grid_ts * tokens_per_second` apart.

    If the processor returns no duration, a time step lasts 1 s. Source: `iter_mm_grid_thw` in vLLM's qwen2_5_vl.py. vLLM casts
    every floating-point output of the processor, including the seconds, to the model's dtype, and then multiplies in float64.
    This function rounds in the same way: in bfloat16, 0.925 s becomes 0.92578. `config` is the model's configuration, whose dtype
    must be the dtype in which the model is served.
    """
    import torch

    vision = config.vision_config
    images = merge_grids(mm_kwargs.get("image_grid_thw"), vision.spatial_merge_size)
    videos = merge_grids(mm_kwargs.get("video_grid_thw"), vision.spatial_merge_size)
    seconds = mm_kwargs.get("second_per_grid_ts")
    if seconds is None:
        return images, [video._replace(time_step=1.0 * vision.tokens_per_second) for video in videos]
    rounded = torch.as_tensor(seconds, dtype=torch.float32).to(config.dtype or torch.float32).tolist()
    steps = (s * vision.tokens_per_second for s in rounded)
    return images, [Grid(*video[:3], step) for video, step in zip(videos, steps, strict=True)]


def compute_tower_layout(vision: Any, grids: Tensor) -> dict[str, Any]:
    """Compute positions, frame starts and window starts for a sequence of media items."""
    from transformers.utils.generic import get_max_seqlen
    from transformers.vision_utils import (
        get_vision_attention_seqlens,
        get_vision_position_ids,
        get_vision_window_index,
    )

    frame_starts, longest_frame = get_vision_attention_seqlens(grids, vision)
    order, window_starts = get_vision_window_index(
        grids,
        spatial_merge_size=vision.spatial_merge_size,
        window_size=vision.window_size,
        patch_size=vision.patch_size,
    )
    return {
        "grid_thw": grids,
        "position_ids": get_vision_position_ids(grids, vision.spatial_merge_size),
        "cu_seqlens": frame_starts,
        "max_seqlen": longest_frame,
        "window_index": order,
        "cu_window_seqlens": window_starts,
        "max_window_seqlen": get_max_seqlen(window_starts, vision),
    }


def compute_vision_windows(vision: Any) -> tuple[int, int]:
    """Return how many blocks have windowed attention (all except `fullatt_block_indexes`), and the side of a window."""
    side = vision.window_size // vision.patch_size // vision.spatial_merge_size
    return vision.depth - len(vision.fullatt_block_indexes), side


def build_tiny_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Qwen2_5_VLConfig

    axes = [head_size // 8, head_size * 3 // 16, head_size * 3 // 16]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": axes}
    windows = {"window_size": 112, "fullatt_block_indexes": [vision["depth"] - 1], "tokens_per_second": 2}
    return Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision | windows, **common)


def build_tiny_processor(tokenizer: PreTrainedTokenizerBase, unit: int, patches: dict[str, int]) -> ProcessorMixin:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": unit, "longest_edge": 256 * unit}
    image, video = Qwen2VLImageProcessor(size=size, **patches), Qwen2VLVideoProcessor(size=size, **patches)
    return Qwen2_5_VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


QWEN2_5_VL = Family(
    name="Qwen2.5-VL",
    model_type="qwen2_5_vl",
    tokens=TOKENS,
    vision=build_vision_defaults(bounds_are_per_video=False),
    grids=build_grids,
    modules=replace(MODULES, blocks=("Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock", "Qwen2_5_VLPatchMerger")),
    tower_layout=compute_tower_layout,
    vision_windows=compute_vision_windows,
    renames=(
        (r"^visual\.", "model.visual."),
        (r"^model\.(?!visual\.|language_model\.)", "model.language_model."),
    ),  # in-memory names match neither rule
    published=((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
    tiny=Tiny(
        patch_size=14,
        default_system="You are a helpful assistant.",
        config=build_tiny_config,
        processor=build_tiny_processor,
    ),
)
