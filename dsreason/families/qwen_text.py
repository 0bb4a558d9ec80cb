"""Text-only families Qwen2.5 and Qwen3, whose tokenizers also have special tokens for media."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsreason.families.family import Family, Modules, Tiny
from dsreason.families.qwen import TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODULES = Modules(
    vision_tower=None,
    head="lm_head",
    norms=("norm",),
    embeddings=("embed_tokens",),
    text_layers=r"\.layers\..*\.(q|k|v|o|gate|up|down)_proj$",
    blocks=("Qwen2DecoderLayer", "Qwen3DecoderLayer"),
)


def build_qwen2_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Qwen2Config

    return Qwen2Config(**text, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **common)


def build_qwen3_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen3Config(**text, head_dim=head_size, rope_parameters=rope, **common)


QWEN2_5 = Family(
    name="Qwen2.5",
    model_type="qwen2",
    tokens=TOKENS,
    modules=MODULES,
    tiny=Tiny(
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", config=build_qwen2_config
    ),
)
QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    tokens=TOKENS,
    modules=MODULES,
    tiny=Tiny(default_system=None, config=build_qwen3_config),
)
