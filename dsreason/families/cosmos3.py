"""Reasoner of Cosmos3 (`cosmos3_omni`): Qwen3-VL with different tensor names, in files that also contain a media generator.

The names are taken from the mappings in vLLM's cosmos3.py and in transformers' cosmos3_omni.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsreason.families.family import Family
from dsreason.families.qwen3_vl import QWEN3_VL
from dsreason.families.qwen3_vl import build_tiny_config as tiny_qwen3_vl_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ATTENTION = r"layers\.\d+\.self_attn\."


def build_tiny_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Cosmos3OmniConfig

    settings = tiny_qwen3_vl_config(text, vision, head_size, common).to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        settings.pop(name, None)
    return Cosmos3OmniConfig(**settings)


COSMOS3 = Family(
    name="Cosmos3 (reasoner)",
    model_type="cosmos3_omni",
    tokens=QWEN3_VL.tokens,
    vision=QWEN3_VL.vision,
    grids=QWEN3_VL.grids,
    modules=QWEN3_VL.modules,
    tower_layout=QWEN3_VL.tower_layout,
    renames=(
        (rf"^({ATTENTION})to_([qkv])\.", r"model.language_model.\1\2_proj."),
        (rf"^({ATTENTION})to_out\.", r"model.language_model.\1o_proj."),
        (rf"^({ATTENTION})norm_([qk])\.", r"model.language_model.\1\2_norm."),
        (r"^(layers|embed_tokens|norm)\.", r"model.language_model.\1."),
        (r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.", r"model.visual.\1."),
    ),
    published=(
        (rf"^model\.language_model\.({ATTENTION})([qkv])_proj\.", r"\1to_\2."),
        (rf"^model\.language_model\.({ATTENTION})o_proj\.", r"\1to_out."),
        (rf"^model\.language_model\.({ATTENTION})([qk])_norm\.", r"\1norm_\2."),
        (r"^model\.(language_model|visual)\.", ""),
    ),
    keeps_published_names=True,
    vllm_class="Cosmos3ForConditionalGeneration",
    weight_folders=("transformer", "vision_encoder"),
    others=(
        r"moe_gen|\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.",
        r"^(proj_in|proj_out|time_embedder|audio_proj_in|audio_proj_out|action_proj_in|action_proj_out)\.",
        r"^(audio|action)_modality_embed(\.|$)",
    ),
    tiny=replace(
        QWEN3_VL.tiny,
        config=build_tiny_config,
        others=(
            "layers.0.self_attn.add_q_proj.weight",
            "layers.0.self_attn.to_q_moe_gen.weight",
            "layers.0.self_attn.norm_added_k.weight",
            "layers.0.mlp_moe_gen.gate_proj.weight",
            "norm_moe_gen.weight",
            "time_embedder.linear_1.weight",
            "audio_modality_embed",
        ),
    ),
)
