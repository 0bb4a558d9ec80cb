"""The Qwen3-VL family (also Cosmos-Reason2): each group of frames is a run of placeholders, preceded by its time as text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsreason.families.family import Family, Grids, Tiny, merge_grids
from dsreason.families.qwen import MODULES, TOKENS, build_vision_defaults

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


def build_grids(mm_kwargs: dict[str, Any], config: Any) -> Grids:
    """Return one grid per image and per group of video frames; times appear in the text (`<1.5 seconds>`), not in positions.

    Source: `_iter_mm_grid_hw` in vLLM's qwen3_vl.py.
    """
    merge_size = config.vision_config.spatial_merge_size
    images = merge_grids(mm_kwargs.get("image_grid_thw"), merge_size)
    videos = merge_grids(mm_kwargs.get("video_grid_thw"), merge_size)
    return images, [video._replace(frames=1) for video in videos for _ in range(video.frames)]


def compute_tower_layout(vision: Any, grids: Tensor) -> dict[str, Any]:
    """Compute learned positions, rotary positions and frame starts for a sequence of media items."""
    from transformers.vision_utils import (
        get_vision_attention_seqlens,
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
    )

    indices, weights = get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=int(vision.num_position_embeddings**0.5),
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=vision.spatial_merge_size,
    )
    frame_starts, longest_frame = get_vision_attention_seqlens(grids, vision)
    return {
        "grid_thw": grids,
        "interp_indices": indices,
        "interp_weights": weights,
        "position_ids": get_vision_position_ids(grids, vision.spatial_merge_size),
        "cu_seqlens": frame_starts,
        "max_seqlen": longest_frame,
    }


def build_tiny_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Qwen3VLConfig

    axes = [head_size * 3 // 16, head_size * 5 // 32, head_size * 5 // 32]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": axes, "mrope_interleaved": True}
    more = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = text | {"rope_parameters": rope, "head_dim": head_size}
    return Qwen3VLConfig(text_config=text, vision_config=vision | more, **common)


def build_tiny_processor(tokenizer: PreTrainedTokenizerBase, unit: int, patches: dict[str, int]) -> ProcessorMixin:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    # vLLM normalises videos with the image processor's values, so both processors need the same values.
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    image = Qwen2VLImageProcessor(size={"shortest_edge": unit, "longest_edge": 256 * unit}, **patches, **half)
    # The limits apply to the pixels of all frames together.
    video = Qwen3VLVideoProcessor(size={"shortest_edge": 2 * unit, "longest_edge": 768 * unit}, **patches, **half)
    return Qwen3VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


QWEN3_VL = Family(
    name="Qwen3-VL",
    model_type="qwen3_vl",
    tokens=TOKENS,
    vision=build_vision_defaults(bounds_are_per_video=True),
    grids=build_grids,
    modules=replace(MODULES, blocks=("Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock", "Qwen3VLVisionPatchMerger")),
    tower_layout=compute_tower_layout,
    tiny=Tiny(patch_size=16, default_system=None, config=build_tiny_config, processor=build_tiny_processor),
)
