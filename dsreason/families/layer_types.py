"""Types of a model's text layers, read from its transformers configuration: attention or gated delta net (linear attention)."""

from __future__ import annotations

from typing import Any

CHUNK = 64
"""Number of tokens in a chunk of the delta rule, which pads each sample to whole chunks."""


def get_layer_types(text: Any) -> list[str]:
    """Return the types of the text layers; empty if the config omits them, as do some models without windows."""
    return text.to_dict().get("layer_types") or []


def count_delta_nets(text: Any) -> int:
    return get_layer_types(text).count("linear_attention")


def has_delta_nets(text: Any) -> bool:
    """Return whether some text layers are delta nets."""
    return count_delta_nets(text) > 0
