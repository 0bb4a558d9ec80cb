"""The Qwen3-VL-MoE family: Qwen3-VL whose decoder layers route each token to a few of many experts.

transformers holds all experts of a layer in two parameters. In published files and in vLLM, the last two axes of both are swapped
(`Transpose(1, 2)` in transformers' conversion_mapping.py, `is_fused_checkpoint_transposed` in vLLM's qwen3_vl_moe.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsreason.families.qwen3_vl import QWEN3_VL
from dsreason.families.qwen3_vl import build_tiny_config as build_dense_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def build_tiny_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Qwen3VLMoeConfig

    dense = build_dense_config(text, vision, head_size, common).to_dict()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": text["intermediate_size"] * 3 // 4}
    for part, more in (("text_config", experts | dict(QWEN3_VL_MOE.fixed_settings)), ("vision_config", {})):
        del dense[part]["model_type"]
        dense[part] |= more
    return Qwen3VLMoeConfig(text_config=dense["text_config"], vision_config=dense["vision_config"], **common)


QWEN3_VL_MOE = replace(
    QWEN3_VL,
    name="Qwen3-VL-MoE",
    model_type="qwen3_vl_moe",
    modules=replace(
        QWEN3_VL.modules,
        blocks=("Qwen3VLMoeTextDecoderLayer", "Qwen3VLMoeVisionBlock", "Qwen3VLMoeVisionPatchMerger"),
        text_layers=r"\.language_model\..*\.(self_attn\.(q|k|v|o)|mlp\.(gate|up|down))_proj$",  # experts get none by default
        experts=r"\.mlp\.experts\.",
    ),
    transposes_experts=True,
    fixed_settings=(("norm_topk_prob", True),),
    tiny=replace(QWEN3_VL.tiny, config=build_tiny_config),
)
