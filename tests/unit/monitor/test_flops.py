from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Cosmos3EdgeConfig,
    Cosmos3EdgeForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from dsreason.monitor.flops import Work, compute_model_flops, find_peak_flops

VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
SPECIAL = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def count_convolution_backward(
    output: Any, inputs: Any, weight: Any, *options: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Count the products for the gradients of inputs and weight, whose shapes are given; torch would ignore the groups."""
    *_, needed = options
    return sum(needed[:2]) * 2 * prod(output) * prod(weight[1:])


CONVOLUTION_BACKWARD = {torch.ops.aten.convolution_backward: count_convolution_backward}


def tiny(family: str, *, tied: bool) -> Any:
    torch.manual_seed(0)
    common = {**SPECIAL, "tie_word_embeddings": tied, "attn_implementation": "eager"}
    if family == "qwen2_5_vl":
        vision = {**VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config={**TEXT, "tie_word_embeddings": tied}, vision_config=vision, **common)
        return Qwen2_5_VLForConditionalGeneration(config)
    if family == "cosmos3_edge":
        vision = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_patches": 16, **VISION}
        text = {**TEXT, "head_dim": 8, "tie_word_embeddings": tied}
        sizes = Cosmos3EdgeConfig(text_config=text, vision_config=vision, projector_hidden_size=40, **common)
        return Cosmos3EdgeForConditionalGeneration(sizes)
    vision = {**VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    text = {**TEXT, "head_dim": 8, "tie_word_embeddings": tied}
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **common)
        config.text_config._experts_implementation = "eager"  # torch does not count the FLOPs of its grouped products
        return Qwen3VLMoeForConditionalGeneration(config)
    assert family == "qwen3_vl"
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **common))


def counted_flops(model: Any, grid: tuple[int, int, int]) -> tuple[float, int]:
    """Let torch count the FLOPs of the forward and backward passes of one sample (text and an image); also return its tokens."""
    t, h, w = grid
    image = [62] + [60] * (t * h * w // 4) + [63]
    ids = torch.tensor([[1, 2, 3, *image, 4, 5, 6, 7]])
    patches = torch.randn(t * h * w, 3 * 4 * 4 * (1 if model.config.model_type == "cosmos3_edge" else 2))
    with FlopCounterMode(display=False, custom_mapping=CONVOLUTION_BACKWARD) as counter:
        out = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == 60).long(),
            pixel_values=patches,
            image_grid_thw=torch.tensor([grid]),
            use_cache=False,
        )
        out.logits.sum().backward()
    return counter.get_total_flops(), ids.shape[1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", ["", "visual", "language_model.layers.0."])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "cosmos3_edge", "qwen3_vl_moe"])
def test_step_flops_match_torch_counter(family: str, frozen: str, tied: bool) -> None:
    model = tiny(family, tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (frozen and frozen in name)
    grid = (1, 4, 10)  # the windows of Qwen2.5-VL are 4 patches wide: the last one is cut
    counted, length = counted_flops(model, grid)
    dsreason_result = compute_model_flops(model).step(Work([(length, 0)], length, [grid]), causal=False)
    assert dsreason_result == pytest.approx(counted, rel=1e-3)  # torch also counts the rotary tables


@pytest.mark.parametrize("frozen", ["", "visual", "language_model.layers.0."])
def test_delta_net_flops_match_torch_counter(frozen: str) -> None:
    torch.manual_seed(0)
    rope = {**TEXT["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_interleaved": True}
    sizes = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    types = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
    text = TEXT | sizes | types | {"head_dim": 16, "hidden_size": 64, "rope_parameters": rope}
    vision = VISION | {"num_position_embeddings": 16, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=vision, **SPECIAL, attn_implementation="eager")
    model = Qwen3_5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (frozen and frozen in name)
    grid = (1, 14, 34)  # with the text 128 tokens, which are whole chunks of the delta rule
    counted, length = counted_flops(model, grid)
    result = compute_model_flops(model).step(Work([(length, 0)], length, [grid]), causal=False)
    assert result == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_missing_tie_setting_is_inferred_from_parameters(family: str) -> None:
    model = tiny(family, tied=False)
    expected = compute_model_flops(model)
    del model.config.text_config.tie_word_embeddings
    assert compute_model_flops(model) == expected


def test_causal_attention_counts_each_pair_once() -> None:
    flops = compute_model_flops(tiny("qwen3_vl", tied=False))
    # 12 x 2 layers x 32 channels x (10 x 11 / 2 pairs); 6 per parameter: 2 x (32 x 32 x 2 + 32 x 16 x 2 + 3 x 32 x 48)
    assert flops.step(Work([(10, 0)])) == 12 * 2 * 32 * 55 + 10 * 6 * 2 * (2048 + 1024 + 4608)


def test_completion_flops_count_only_its_own_tokens() -> None:
    flops = compute_model_flops(tiny("qwen3_vl", tied=False))
    alone, behind = flops.step(Work([(4, 0)])), flops.step(Work([(4, 10)]))
    assert behind - alone == 12 * 2 * 32 * 4 * 10
    full = flops.step(Work([(14, 0)]))
    assert flops.step(Work([(10, 0), (4, 10)])) == full


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peak_is_dense_bf16(name: str, tflops: float) -> None:
    assert find_peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "Tesla V100-SXM2-16GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert find_peak_flops(name) is None
