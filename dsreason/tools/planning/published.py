"""Architectures of published models, for use without the Hub: the values in config.json that determine the models' sizes."""

from __future__ import annotations

from typing import Any

Sizes = tuple[int, int, int, int, int, int, bool]
"""Hidden size, layers, attention heads, key-value heads, intermediate size, vocabulary size, and whether the head is tied."""

QWEN2: dict[str, Sizes] = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
    "72B": (8192, 80, 64, 8, 29568, 152064, False),
}
QWEN3: dict[str, Sizes] = {
    "0.6B": (1024, 28, 16, 8, 3072, 151936, True),
    "1.7B": (2048, 28, 16, 8, 6144, 151936, True),
    "4B": (2560, 36, 32, 8, 9728, 151936, True),
    "8B": (4096, 36, 32, 8, 12288, 151936, False),
    "14B": (5120, 40, 40, 8, 17408, 151936, False),
    "32B": (5120, 64, 64, 8, 25600, 151936, False),
}
QWEN3_MOE: dict[str, tuple[Sizes, int]] = {
    "30B-A3B": ((2048, 48, 32, 4, 6144, 151936, False), 768),
    "235B-A22B": ((4096, 94, 64, 4, 12288, 151936, False), 1536),
}
"""Sizes of mixtures of 128 experts, of which each token uses 8, and the intermediate size of an expert."""
QWEN3_HEAD = 128
"""Channels per attention head in all Qwen3 models."""


def make_text_config(sizes: Sizes) -> dict[str, Any]:
    hidden, layers, heads, kv_heads, intermediate, vocabulary, _ = sizes
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


def make_qwen2_5_vl(size: str) -> dict[str, Any]:
    text = QWEN2[size]
    hidden = text[0]
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3456 if size in ("32B", "72B") else 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text_part = make_text_config(text) | {"rope_parameters": rope}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text_part,
        "vision_config": vision,
        "tie_word_embeddings": text[-1],
    }


def make_qwen3_vl(text: Sizes, *, large_tower: bool) -> dict[str, Any]:
    depth, width, inner, deep = (27, 1152, 4304, [8, 16, 24]) if large_tower else (24, 1024, 4096, [5, 11, 17])
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text[0],
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": deep,
    }
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text_part = make_text_config(text) | {"rope_parameters": rope, "head_dim": QWEN3_HEAD}
    return {
        "model_type": "qwen3_vl",
        "text_config": text_part,
        "vision_config": vision,
        "tie_word_embeddings": text[-1],
    }


def make_qwen3_vl_moe(size: str) -> dict[str, Any]:
    text, intermediate = QWEN3_MOE[size]
    config = make_qwen3_vl(text, large_tower=True) | {"model_type": "qwen3_vl_moe"}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": intermediate}
    config["text_config"] |= experts
    return config


def make_text_only_config(model_type: str, sizes: Sizes) -> dict[str, Any]:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    head = {"head_dim": QWEN3_HEAD} if model_type == "qwen3" else {}
    return {"model_type": model_type, "tie_word_embeddings": sizes[-1], **make_text_config(sizes), **rope, **head}


def list_architectures() -> dict[str, dict[str, Any]]:
    """Return the known architectures: the model's name on the Hub in lower case → its values in config.json."""
    qwen3_vl_2b, qwen3_vl_8b = (
        make_qwen3_vl(QWEN3["1.7B"], large_tower=False),
        make_qwen3_vl(QWEN3["8B"], large_tower=True),
    )
    published_models = {
        f"Qwen/Qwen2.5-VL-{size}-Instruct": make_qwen2_5_vl(size) for size in ("3B", "7B", "32B", "72B")
    }
    published_models |= {"nvidia/Cosmos-Reason1-7B": make_qwen2_5_vl("7B")}
    for kind in ("Instruct", "Thinking"):
        published_models |= {
            f"Qwen/Qwen3-VL-2B-{kind}": qwen3_vl_2b,
            f"Qwen/Qwen3-VL-4B-{kind}": make_qwen3_vl(QWEN3["4B"], large_tower=False),
            f"Qwen/Qwen3-VL-8B-{kind}": qwen3_vl_8b,
            f"Qwen/Qwen3-VL-32B-{kind}": make_qwen3_vl(QWEN3["32B"], large_tower=True),
            f"Qwen/Qwen3-VL-30B-A3B-{kind}": make_qwen3_vl_moe("30B-A3B"),
            f"Qwen/Qwen3-VL-235B-A22B-{kind}": make_qwen3_vl_moe("235B-A22B"),
        }
    published_models |= {"nvidia/Cosmos-Reason2-2B": qwen3_vl_2b, "nvidia/Cosmos-Reason2-8B": qwen3_vl_8b}
    published_models |= {
        "nvidia/Cosmos3-Nano": qwen3_vl_8b | {"model_type": "cosmos3_omni"},
        "nvidia/Cosmos3-Super": make_qwen3_vl(QWEN3["32B"], large_tower=True) | {"model_type": "cosmos3_omni"},
    }
    # The default sizes of transformers' classes are those of these models.
    published_models |= {
        "nvidia/Cosmos3-Edge": {"model_type": "cosmos3_edge"},
        "Qwen/Qwen3.5-9B": {"model_type": "qwen3_5"},
    }
    for size, sizes in QWEN2.items():
        published_models |= {
            f"Qwen/Qwen2.5-{size}{kind}": make_text_only_config("qwen2", sizes) for kind in ("", "-Instruct")
        }
    for size, sizes in QWEN3.items():
        published_models[f"Qwen/Qwen3-{size}"] = make_text_only_config("qwen3", sizes)
    return {name.lower(): config for name, config in published_models.items()}
