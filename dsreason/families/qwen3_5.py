"""The Qwen3.5 family (dense): most decoder layers have a gated delta net instead of attention; the vision tower has no DeepStack.

The published files also contain the multi-token prediction head (`mtp.`), which neither transformers nor dsreason builds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsreason.families.family import Family
from dsreason.families.qwen3_vl import QWEN3_VL

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig

DELTA_HEAD_SIZE = 128
"""Head size of the tiny model's delta nets, the only one that vLLM's CPU kernel supports; published models have the same."""


def build_tiny_config(
    text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]
) -> PreTrainedConfig:
    from transformers import Qwen3_5Config

    pairs = head_size // 8  # rotary positions turn a quarter of a head's channels, in pairs
    axes = [pairs - (pairs + 1) // 3 - pairs // 3, (pairs + 1) // 3, pairs // 3]
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": axes,
        "mrope_interleaved": True,
    }
    layers = text["num_hidden_layers"]
    delta_nets = {
        "layer_types": [
            "full_attention" if number % 4 == 0 or number == layers else "linear_attention"
            for number in range(1, layers + 1)
        ],
        "linear_key_head_dim": DELTA_HEAD_SIZE,
        "linear_value_head_dim": DELTA_HEAD_SIZE,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": common["tie_word_embeddings"],  # vLLM reads it here, and transformers one level higher
    }
    text = text | {"rope_parameters": rope, "head_dim": head_size} | delta_nets
    return Qwen3_5Config(text_config=text, vision_config=vision | {"num_position_embeddings": 64}, **common)


def draw_tiny_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
    """Draw the tensors of a delta net and the text norms, whose weights are added to 1; None for other tensors.

    The state decays per token by exp(-A softplus(a + dt_bias)). As in Mamba-2, A is uniform in [1, 16), and softplus(dt_bias) is
    log-uniform in [0.001, 0.1), so that some heads forget within a few tokens, and others only after hundreds.
    """
    import torch

    if name.endswith(".A_log"):
        return torch.empty(shape, device=generator.device).uniform_(1, 16, generator=generator).log_()
    if name.endswith(".dt_bias"):
        steps = torch.empty(shape, device=generator.device).uniform_(-3, -1, generator=generator)
        return (10**steps).expm1().log()  # the inverse of softplus
    if "norm" in name and ".visual." not in name and ".linear_attn." not in name:
        return torch.zeros(shape)
    return None


QWEN3_5 = Family(
    name="Qwen3.5",
    model_type="qwen3_5",
    tokens=QWEN3_VL.tokens,
    vision=QWEN3_VL.vision,
    grids=QWEN3_VL.grids,
    modules=replace(
        QWEN3_VL.modules,
        # Not the delta nets' in_proj_a and in_proj_b, which have one output per head and control decay and update.
        text_layers=r"\.language_model\..*\.((q|k|v|o|gate|up|down|out)_proj|in_proj_(qkv|z))$",
        vision_layers=r"\.visual\.(blocks|merger)\.",
        blocks=("Qwen3_5DecoderLayer", "Qwen3_5VisionBlock", "Qwen3_5VisionPatchMerger"),
    ),
    tower_layout=QWEN3_VL.tower_layout,
    has_plain_layers=False,  # norms add 1 to their weights, queries have gates, and positions turn a quarter of a head
    vllm_partitions={"in_proj_qkv": 3},  # vLLM's in_proj_qkvz has the partitions query, key, value and z
    others=(r"^mtp\.",),
    tiny=replace(
        QWEN3_VL.tiny,
        config=build_tiny_config,
        draw=draw_tiny_tensor,
        others=("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"),
    ),
)
