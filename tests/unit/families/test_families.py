"""Names in the model families: model types, and tensors of published checkpoints."""

from __future__ import annotations

import pytest

from dsreason.errors import CheckpointError
from dsreason.families import FAMILIES, get_family


def test_unsupported_model_type_error_lists_supported_types() -> None:
    with pytest.raises(CheckpointError, match=r"'qwen2_vl' is not supported.*Qwen2\.5-VL \(qwen2_5_vl\).*qwen3_vl"):
        get_family("qwen2_vl")


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_family_is_found_by_model_type(model_type: str) -> None:
    assert get_family(model_type).model_type == model_type


@pytest.mark.parametrize(
    ("published", "in_memory"),
    [
        ("visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"),
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("model.norm.weight", "model.language_model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.merger.ln_q.weight", "model.visual.merger.ln_q.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
    ],
)
def test_qwen2_5_names_map_to_memory_names(published: str, in_memory: str) -> None:
    assert FAMILIES["qwen2_5_vl"].rename(published) == in_memory


def test_qwen3_names_are_unchanged() -> None:
    for name in ("model.visual.pos_embed.weight", "model.language_model.norm.weight", "lm_head.weight"):
        assert FAMILIES["qwen3_vl"].rename(name) == name
