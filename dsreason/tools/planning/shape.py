"""Sizes of a model that determine its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsreason.families import get_family
from dsreason.families.layer_types import count_delta_nets, has_delta_nets
from dsreason.monitor.flops import get_head_size


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; `read_shape` reads them from a transformers configuration."""

    hidden: int
    layers: int
    attention_layers: int
    """Number of text layers that cache keys and values; the others have delta nets."""
    state_values: int
    """Number of values in the states of a sequence in all delta nets, which do not depend on the sequence's length."""
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


def count_state_values(text: Any) -> int:
    """Return the number of values of a sequence's recurrent states; those of the convolutions are fewer by a factor of 100."""
    if not has_delta_nets(text):
        return 0
    head_values = text.linear_key_head_dim * text.linear_value_head_dim
    return int(count_delta_nets(text) * text.linear_num_value_heads * head_values)


def read_shape(config: Any) -> ModelShape:
    text = config.get_text_config()
    shape = ModelShape(
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        attention_layers=text.num_hidden_layers - count_delta_nets(text),
        state_values=count_state_values(text),
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
