"""Reasoner of Cosmos3-Edge (`cosmos3_edge`): a dense Nemotron text model and a SigLIP2 tower, in files with a media generator.

The names are taken from the mappings in vLLM's cosmos3_edge.py and in transformers' cosmos3_edge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsreason.families.cosmos3 import COSMOS3
from dsreason.families.family import Family, Modules, Tiny, TowerShape, Vision
from dsreason.families.qwen import TOKENS
from dsreason.families.qwen3_vl import build_grids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

ATTENTION = r"layers\.\d+\.self_attn\."
VIDEO_TOKENS = 24 * 1024 * 1024 // 32**2
"""Largest video that the processor accepts, in tokens of 32 x 32 pixels."""


def read_tower_shape(vision: Any) -> TowerShape:
    """Read the shape from a `vision_config`; each frame is a separate patch, and positions are learned instead of rotary."""
    return TowerShape(vision.num_hidden_layers, vision.num_attention_heads, 1, is_rotary=False)


def compute_tower_layout(vision: Any, grids: Tensor) -> dict[str, Any]:
    """Compute frame starts for a sequence of media items; the tower resizes its learned positions to each grid."""
    from transformers.vision_utils import get_vision_attention_seqlens

    frame_starts, longest_frame = get_vision_attention_seqlens(grids, vision)
    return {"grid_thw": grids, "cu_seqlens": frame_starts, "max_seqlen": longest_frame}


def build_tiny_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Cosmos3EdgeConfig

    axes = [head_size * 3 // 16, head_size * 5 // 32, head_size * 5 // 32]
    rope = {"rope_type": "default", "rope_theta": 1e8, "mrope_section": axes}
    tower = {
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["depth"],
        "num_attention_heads": vision["num_heads"],
        "patch_size": vision["patch_size"],
        "num_patches": 64,
        "spatial_merge_size": vision["spatial_merge_size"],
    }
    projector = {  # vLLM reads this section, transformers only keeps it
        "model_type": "cosmos3_edge_projector",
        "input_hidden_size": vision["hidden_size"],
        "merger_intermediate_size": 2 * vision["hidden_size"],
        "out_hidden_size": text["hidden_size"],
        "spatial_merge_size": vision["spatial_merge_size"],
        "use_postshuffle_norm": False,
    }
    return Cosmos3EdgeConfig(
        text_config=text | {"rope_parameters": rope, "head_dim": head_size, "pad_token_id": text["bos_token_id"]},
        vision_config=tower,
        projector_hidden_size=2 * vision["hidden_size"],
        projector_config=projector,
        **common | {"tie_word_embeddings": False},  # the model's class never ties them
    )


def build_tiny_processor(tokenizer: PreTrainedTokenizerBase, unit: int, patches: dict[str, int]) -> ProcessorMixin:
    from transformers import Cosmos3EdgeImageProcessor, Cosmos3EdgeProcessor, Cosmos3EdgeVideoProcessor

    patches = patches | {"temporal_patch_size": 1}
    image = Cosmos3EdgeImageProcessor(size={"shortest_edge": unit, "longest_edge": 256 * unit}, **patches)
    # The limits apply to the pixels of all frames together.
    video = Cosmos3EdgeVideoProcessor(size={"shortest_edge": 2 * unit, "longest_edge": 768 * unit}, **patches)
    return Cosmos3EdgeProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


COSMOS3_EDGE = Family(
    name="Cosmos3-Edge (reasoner)",
    model_type="cosmos3_edge",
    tokens=replace(TOKENS, unused_media=(), others=()),
    vision=Vision(
        bounds_are_per_video=True,
        fps=2.0,
        min_frames=4,
        max_frames=768,
        max_frame_tokens=VIDEO_TOKENS,
        max_video_tokens=VIDEO_TOKENS,
        caps_frames=False,
        channels_last=True,
        frames_have_marks=True,
    ),
    grids=build_grids,
    modules=Modules(
        vision_tower="model.visual",
        head="lm_head",
        norms=("norm",),
        embeddings=("embed_tokens", "position_embedding"),
        text_layers=r"\.language_model\..*\.((q|k|v|o)_proj|fc1|fc2)$",
        vision_layers=r"\.visual\.encoder\.|\.projector\.",
        patch_embedding="patch_embedding",
        vision_blocks="model.visual.encoder.layers",
        merger="projector",
        projector="model.projector",
        blocks=("Cosmos3EdgeTextDecoderLayer", "Cosmos3EdgeVisionEncoderLayer", "Cosmos3EdgePatchMerger"),
    ),
    tower_layout=compute_tower_layout,
    host_arguments=("grid_thw",),
    tower_shape=read_tower_shape,
    has_text_positions=False,
    renames=(
        (rf"^({ATTENTION})to_([qkv])\.", r"model.language_model.\1\2_proj."),
        (rf"^({ATTENTION})to_out\.", r"model.language_model.\1o_proj."),
        (r"^(layers\.\d+\.mlp\.)up_proj\.", r"model.language_model.\1fc1."),
        (r"^(layers\.\d+\.mlp\.)down_proj\.", r"model.language_model.\1fc2."),
        (r"^(layers|embed_tokens|norm)\.", r"model.language_model.\1."),
    ),
    published=(
        (rf"^model\.language_model\.({ATTENTION})([qkv])_proj\.", r"\1to_\2."),
        (rf"^model\.language_model\.({ATTENTION})o_proj\.", r"\1to_out."),
        (r"^model\.language_model\.(layers\.\d+\.mlp\.)fc1\.", r"\1up_proj."),
        (r"^model\.language_model\.(layers\.\d+\.mlp\.)fc2\.", r"\1down_proj."),
        (r"^model\.language_model\.", ""),
    ),
    keeps_published_names=True,
    vllm_class="Cosmos3EdgeForConditionalGeneration",
    weight_folders=COSMOS3.weight_folders,
    others=(*COSMOS3.others, r"\.k_norm_und_for_gen\."),
    tiny=Tiny(
        patch_size=16,
        default_system=None,
        config=build_tiny_config,
        processor=build_tiny_processor,
        others=(
            "layers.0.self_attn.add_q_proj.weight",
            "layers.0.self_attn.k_norm_und_for_gen.weight",
            "layers.0.mlp_moe_gen.up_proj.weight",
            "norm_moe_gen.weight",
            "proj_in.weight",
            "time_embedder.linear_1.weight",
            "action_modality_embed",
        ),
    ),
)
