"""Sizes of a model that determine its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsreason.families import get_family
from dsreason.monitor.flops import get_head_size


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; `read_shape` reads them from a transformers configuration."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    vision_hidden: int = 0
    vision_heads: int = 0
    vision_depth: int = 0
    """Number of vision blocks; 0 if the model is text-only."""
    merge: int = 1
    """Patches per token along each side."""
    frames_per_patch: int = 1
    patch_values: int = 0
    """Values per patch."""
    mergers: int = 0
    """Number of mergers, whose features have the text model's hidden size: the final one, and one per DeepStack layer."""
    token_pixels: int = 0
    """Pixels per token in one frame."""

    def count_patches(self, tokens: int) -> int:
        return tokens * self.merge**2


def read_shape(config: Any) -> ModelShape:
    text = config.get_text_config()
    shape = ModelShape(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_size=get_head_size(text),
    )
    family = get_family(config.model_type)
    if family.vision is None:
        return shape
    vision = config.vision_config
    tower = family.tower_shape(vision)
    return replace(
        shape,
        vision_hidden=vision.hidden_size,
        vision_heads=tower.num_heads,
        vision_depth=tower.depth,
        merge=vision.spatial_merge_size,
        frames_per_patch=tower.temporal_patch_size,
        patch_values=3 * tower.temporal_patch_size * vision.patch_size**2,
        mergers=1 + len(vision.to_dict().get("deepstack_visual_indexes") or ()),
        token_pixels=(vision.patch_size * vision.spatial_merge_size) ** 2,
    )
