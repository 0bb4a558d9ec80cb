"""The sizes of a model that memory is reckoned from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsreason.families import get_family
from dsreason.monitor.flops import get_head_size


@dataclass(frozen=True)
class ModelShape:
    """Example: `read_shape(config)` of a transformers configuration."""

    hidden: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    vision_hidden: int = 0
    vision_depth: int = 0
    """Blocks; 0: the model reads only text."""
    merge: int = 1
    """Patches along one side of a token."""
    patch_values: int = 0
    """Values of one patch."""
    mergers: int = 0
    """Number of mergers, which give features as wide as a token's: the last one, and those of deeper layers."""
    token_pixels: int = 0
    """Pixels behind one token, in one frame."""

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
    if get_family(config.model_type).vision is None:
        return shape
    vision = config.vision_config
    return replace(
        shape,
        vision_hidden=vision.hidden_size,
        vision_depth=vision.depth,
        merge=vision.spatial_merge_size,
        patch_values=3 * vision.temporal_patch_size * vision.patch_size**2,
        mergers=1 + len(vision.to_dict().get("deepstack_visual_indexes") or ()),
        token_pixels=(vision.patch_size * vision.spatial_merge_size) ** 2,
    )
