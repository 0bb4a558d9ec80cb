"""The choice of layers that get adapters, the adapters' initial values, and the delta that they add to a weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.config.schema_lora import LoRAConfig
from dsreason.errors import ConfigError
from dsreason.models.load import load_model
from dsreason.models.lora import (
    Delta,
    add_adapters,
    disable_adapters,
    find_adapted_layers,
    find_adapters,
    get_adapter_names,
    get_adapter_scales,
    get_adapter_settings,
    is_adapter,
    to_base_name,
)

TEXT = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.fixture
def model(tiny: Path) -> Any:
    return load_model(tiny, dtype=torch.float32)


def layers(model: Any, **settings: Any) -> list[str]:
    return find_adapted_layers(model, LoRAConfig(rank=4, **settings))


def test_language_model_matrices_get_adapters_by_default(model: Any) -> None:
    expected = {f"model.language_model.layers.{number}.{name}" for number in (0, 1) for name in TEXT}
    assert set(layers(model)) == expected


def test_vision_option_adds_tower_and_merger_adapters(model: Any) -> None:
    added = set(layers(model, vision=True)) - set(layers(model))
    linear = {name for name, item in model.model.visual.named_modules() if isinstance(item, torch.nn.Linear)}
    assert added == {f"model.visual.{name}" for name in linear}


def test_lora_targets_match_anywhere_in_names(model: Any) -> None:
    assert layers(model, targets=[r"layers\.1\..*\.[qv]_proj"]) == [
        "model.language_model.layers.1.self_attn.q_proj",
        "model.language_model.layers.1.self_attn.v_proj",
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"targets": ["lm_head"]}, "matches lm_head, the output layer, which is also the embedding"),
        ({"targets": ["q_prj"]}, "'q_prj' matches none of 27 linear layers; similar names: q_proj"),
        ({"targets": [""]}, "lora.targets contains an empty pattern"),
        ({"targets": ["patch_embed"]}, ", but only linear layers can have an adapter"),
        ({"targets": ["embed_tokens"]}, "model.language_model.embed_tokens (Embedding)"),
        ({"rank_pattern": {"visual": 4}}, "lora.rank_pattern: 'visual' matches none of the 14 layers"),
        ({"alpha_pattern": {"visual": 4}}, "lora.alpha_pattern: 'visual' matches none of the 14 layers"),
    ],
)
def test_invalid_target_pattern_is_rejected(model: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        layers(model, **settings)
    assert text in str(raised.value)


def test_all_wrong_targets_are_reported_at_once(model: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        layers(model, targets=["lm_head", "q_prj"])
    assert len(str(raised.value).splitlines()) == 2


def test_adapters_depend_on_seed_and_train_exclusively(tiny: Path) -> None:
    result = []
    for seed, draws in ((3, 0), (3, 5), (4, 0)):
        model: Any = load_model(tiny, dtype=torch.float32)
        torch.rand(draws)
        before = torch.get_rng_state()
        add_adapters(model, LoRAConfig(rank=4), seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        result.append({name: item.detach() for name, item in model.named_parameters() if item.requires_grad})
    assert all(is_adapter(name) for name in result[0])
    assert all(torch.equal(result[0][name], result[1][name]) for name in result[0])
    assert not all(torch.equal(result[0][name], result[2][name]) for name in result[0])
    assert not any(item.any() for name, item in result[0].items() if "lora_B" in name)


def test_rank_and_alpha_patterns_match_peft(model: Any) -> None:
    settings = LoRAConfig(
        rank=8, vision=True, rank_pattern={"visual": 4, "k_proj": 2}, alpha_pattern={r"visual\.": 32.0}
    )
    add_adapters(model, settings, seed=0)
    ranks = {name: layer.r["default"] for name, layer in find_adapters(model).items()}
    scales = get_adapter_scales(model)
    assert {ranks[name] for name in ranks if "visual" in name} == {4}
    assert {scales[name] for name in ranks if "visual" in name} == {8.0}
    assert {(ranks[name], scales[name]) for name in ranks if "k_proj" in name} == {(2, 8.0)}
    assert {(ranks[name], scales[name]) for name in ranks if "q_proj" in name} == {(8, 2.0)}
    written = get_adapter_settings(model)
    assert (written["r"], written["lora_alpha"], written["inference_mode"]) == (8, 16, True)
    assert isinstance(written["target_modules"], list)


def test_rslora_scales_by_root_of_rank(model: Any) -> None:
    add_adapters(model, LoRAConfig(rank=16, alpha=8, rslora=True), seed=0)
    assert set(get_adapter_scales(model).values()) == {2.0}


def test_disabled_adapters_add_nothing_and_stay_trainable(model: Any) -> None:
    add_adapters(model, LoRAConfig(rank=4), seed=0)
    layer, x = model.model.language_model.layers[0].mlp.up_proj, torch.randn(2, 128)
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1.0)
        plain = layer.base_layer(x)
        assert not torch.equal(layer(x), plain)
        with disable_adapters(model):
            assert torch.equal(layer(x), plain)
        assert not torch.equal(layer(x), plain)
    assert all(item.requires_grad == is_adapter(name) for name, item in model.named_parameters())


def test_base_and_adapter_names_follow_parameter_name() -> None:
    layer = "model.language_model.layers.0.self_attn.q_proj"
    assert to_base_name(f"{layer}.base_layer.weight") == f"{layer}.weight"
    assert to_base_name(f"{layer}.base_layer.bias") == f"{layer}.bias"
    assert to_base_name(f"{layer}.weight") == f"{layer}.weight"
    assert get_adapter_names(f"{layer}.base_layer.weight") == (
        f"{layer}.lora_A.default.weight",
        f"{layer}.lora_B.default.weight",
    )
    assert get_adapter_names(f"{layer}.base_layer.bias") == ()
    assert get_adapter_names(f"{layer}.weight") == ()


# W [2, 2], A [1, 2], B [2, 1], scale 0.5: the delta is [[0.5, 1], [-1, -2]], its norm 2.5, that of W 5.
W, DELTA = torch.tensor([[3.0, 0.0], [0.0, 4.0]]), Delta(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [-2.0]]), 0.5)


def test_delta_is_scaled_product_of_factors() -> None:
    assert DELTA.merge_with(W, torch.float32).tolist() == [[3.5, 1.0], [-1.0, 2.0]]
    assert W.tolist() == [[3.0, 0.0], [0.0, 4.0]]
    assert DELTA.relative_to(W) == pytest.approx(0.5)


def test_merged_weight_is_rounded_once() -> None:
    # In bfloat16, which has steps of 2^-7 from 1 on: 1 + 2^-9 + 2^-9 is 1 if rounded in between.
    step = 2.0**-9
    weight = torch.tensor([[1.0]], dtype=torch.bfloat16)
    delta = Delta(*(torch.tensor([[1.0]], dtype=torch.bfloat16) for _ in "ab"), scale=2 * step + 1e-6)
    assert delta.merge_with(weight, torch.bfloat16).item() == 1 + 2.0**-7
    assert delta.merge_with(weight, torch.float32).item() == pytest.approx(1 + 2 * step + 1e-6, abs=1e-7)


def test_zero_adapter_leaves_weight_bits_unchanged() -> None:
    weight = torch.tensor([[-0.0, 1.0], [math.pi, -1e-30]], dtype=torch.bfloat16)
    merged = Delta(torch.randn(3, 2), torch.zeros(2, 3), 2.0).merge_with(weight, torch.bfloat16)
    assert torch.equal(merged.view(torch.int16), weight.view(torch.int16))
