"""A mixture of experts: the layout of its files, the settings of vLLM, routing, and what is refused."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from dsreason.checkpoints.export import rename_for_export, write_model_folder
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_lora import LoRAConfig
from dsreason.data.collate import append_dummies, collate, pack
from dsreason.data.sources import open_datasets
from dsreason.engine.learning_rates import get_multipliers
from dsreason.errors import CheckpointError, ConfigError
from dsreason.families import FAMILIES
from dsreason.losses.router import compute_routing
from dsreason.models.load import load_model, read_model_config
from dsreason.models.lora import (
    Delta,
    add_adapters,
    find_adapted_layers,
    get_adapted_layer,
    get_adapted_weight,
    get_adapter_names,
    get_adapter_scales,
    is_adapter,
    to_base_name,
)
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import open_encoder
from dsreason.models.tiny import build_tiny
from dsreason.tools.planning.architecture import Architecture
from dsreason.tools.planning.parameters import build_meta_model, count_parameters
from dsreason.tools.planning.pieces import build_pieces
from dsreason.train.common.preflight import check_model
from tests.integration.lora import disturb
from tests.integration.rows import write_mixed_rows

NAME = "model.language_model.layers.1.mlp.experts.{}"


@pytest.fixture(scope="module")
def model(tiny_qwen3_vl_moe: Path) -> Any:
    return load_model(tiny_qwen3_vl_moe, dtype=torch.float32)


def change_settings(folder: Path, **settings: Any) -> Path:
    """Change settings of the language model in config.json; None removes a setting."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] = {
        name: value for name, value in (config["text_config"] | settings).items() if value is not None
    }
    file.write_text(json.dumps(config))
    return folder


def test_files_have_transposed_experts(tiny_qwen3_vl_moe: Path, model: Any) -> None:
    stored, loaded = load_file(tiny_qwen3_vl_moe / "model.safetensors"), dict(model.named_parameters())
    reference = dict(AutoModelForImageTextToText.from_pretrained(tiny_qwen3_vl_moe).named_parameters())
    assert stored[NAME.format("gate_up_proj")].shape == (8, 128, 384)
    assert stored[NAME.format("down_proj")].shape == (8, 192, 128)
    assert reference.keys() == loaded.keys() and all(loaded[name].equal(reference[name]) for name in reference)
    for part in ("gate_up_proj", "down_proj"):
        assert loaded[NAME.format(part)].equal(stored[NAME.format(part)].transpose(1, 2))
        assert loaded[NAME.format(part)].is_contiguous()


def test_experts_in_memory_layout_are_rejected(tmp_path: Path, tiny_qwen3_vl_moe: Path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(tiny_qwen3_vl_moe, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    save_file({name: t.mT.contiguous() if "experts" in name else t for name, t in tensors.items()}, file)
    with pytest.raises(CheckpointError, match=r"4 with a different shape: .*down_proj has \[8, 192, 128\]"):
        load_model(tmp_path / "model", dtype=torch.float32)


def test_export_equals_published_files(tmp_path: Path, tiny_qwen3_vl_moe: Path, model: Any) -> None:
    source = change_settings(Path(shutil.copytree(tiny_qwen3_vl_moe, tmp_path / "source")), norm_topk_prob=None)
    tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    exported = write_model_folder(rename_for_export(tensors, source), source, tmp_path / "export", dtype="fp32")
    expected, result = (load_file(folder / "model.safetensors") for folder in (tiny_qwen3_vl_moe, exported))
    assert result.keys() == expected.keys() and all(result[name].equal(expected[name]) for name in expected)
    assert json.loads((exported / "config.json").read_text())["text_config"]["norm_topk_prob"] is True  # for vLLM


def test_unsupported_router_setting_is_rejected(tmp_path: Path, tiny_qwen3_vl_moe: Path) -> None:
    folder = change_settings(Path(shutil.copytree(tiny_qwen3_vl_moe, tmp_path / "model")), norm_topk_prob=False)
    with pytest.raises(CheckpointError, match="norm_topk_prob = False, but transformers supports only True"):
        load_model(folder, dtype=torch.float32)


def test_routing_counts_only_tokens_of_samples(tmp_path: Path, tiny_qwen3_vl_moe: Path) -> None:
    """Compare with transformers' router logits, one sample at a time: packed and padded rows, with and without dummy media."""
    rows = write_mixed_rows(tmp_path, 4)
    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}})
    encoder = open_encoder(tiny_qwen3_vl_moe, dtype=torch.float32, max_length=512, max_length_key="model.max_length")
    samples, _ = open_datasets(config.data)
    encoded = [encoder.encode(samples[i]) for i in range(4)]
    reference = AutoModelForImageTextToText.from_pretrained(tiny_qwen3_vl_moe, attn_implementation="eager")
    outputs = []
    for item in encoded:
        inputs = {"input_ids": item.input_ids[None], "mm_token_type_ids": item.mm_token_type_ids[None]}
        with torch.no_grad():
            outputs.append(reference(**inputs, **item.mm_kwargs, output_router_logits=True).router_logits)
    layers = [torch.cat(layer) for layer in zip(*outputs, strict=True)]
    expected = sum(load_balancing_loss_func((layer,), 8, 2) for layer in layers) / len(layers)
    packed, padded, dummy = pack(encoded), collate(encoded, pad_id=0), [encoder.build_dummy("image")]
    policy = Policy(load_model(tiny_qwen3_vl_moe, dtype=torch.float32), router_loss_weight=1.0)
    for batch in (packed, padded, append_dummies(packed, dummy, pad_id=0), append_dummies(padded, dummy, pad_id=0)):
        policy(batch)
        output = policy.router_output
        routing = compute_routing(output.logits, output.counted, output.num_tokens, top_k=2)
        torch.testing.assert_close(routing.balance_loss, expected, rtol=0, atol=2e-6)
        assert routing.loads.sum(1).tolist() == [2 * sum(map(len, encoded))] * 2
        assert routing.balance_loss.requires_grad
    policy.router_loss_weight = 0.0
    policy(packed)
    assert not any(layer.requires_grad for layer in policy.router_output.logits)


def test_adapters_leave_experts_frozen_by_default(model: Any) -> None:
    assert len(find_adapted_layers(model, LoRAConfig(rank=4))) == 2 * 4  # query, key, value and output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": (r"\.(q|k|v|o|gate|up|down)_proj$",)},
            r"down_proj, but not .*gate_up_proj; use a pattern that matches both",
        ),
        ({"targets": (r"mlp\.experts",), "dropout": 0.1}, r"lora\.dropout \(0\.1\) does not apply to experts"),
    ],
)
def test_impossible_adapters_of_experts_are_rejected(model: Any, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_adapted_layers(model, LoRAConfig(rank=4, **settings))


def test_merged_experts_compute_the_adapted_output(tiny_qwen3_vl_moe: Path, model: Any) -> None:
    """Each expert has its own product; merge them into a plain model, and compare logits and the norms of the changes."""
    adapted, merged = (load_model(tiny_qwen3_vl_moe, dtype=torch.float32).requires_grad_(False) for _ in range(2))
    add_adapters(adapted, LoRAConfig(rank=4, targets=(r"mlp\.experts", r"q_proj$")), seed=0)
    disturb(adapted, seed=1)
    parameters, weights, scales = (
        dict(adapted.named_parameters()),
        dict(merged.named_parameters()),
        get_adapter_scales(adapted),
    )
    for name in [name for name in parameters if get_adapter_names(name)]:
        a, b = (parameters[adapter_name].detach() for adapter_name in get_adapter_names(name))
        weight = weights[to_base_name(name)]
        delta = Delta(a, b, scales[get_adapted_layer(name)])
        result = delta.merge_with(weight, torch.float32)
        assert delta.relative_to(weight) == pytest.approx(float((result - weight).norm() / weight.norm()), rel=1e-4)
        weight.copy_(result)
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        outputs = adapted(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, outputs, rtol=0, atol=5e-6)
        assert (model(input_ids=ids).logits - outputs).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "sections", "message"),
    [
        ("qwen3_vl_moe", {"model": {"quantize": "nf4"}, "lora": {"rank": 4}}, "leave the experts of Qwen3-VL-MoE"),
        ("qwen3_vl", {"train": {"router_loss_weight": 0.1}}, "Qwen3-VL is not a mixture of experts; set it to 0"),
    ],
)
def test_settings_for_other_kind_are_rejected(family: str, sections: Any, message: str, request: Any) -> None:
    path = {"path": str(request.getfixturevalue(f"tiny_{family}"))}
    config = SFTConfig.model_validate(sections | {"model": path | sections.get("model", {})})
    with pytest.raises(ConfigError, match=message):
        check_model(config)


def test_blocks_are_classes_of_the_model(model: Any) -> None:
    classes = {type(module).__name__ for module in model.modules()}
    assert set(FAMILIES["qwen3_vl_moe"].modules.blocks) <= classes


def test_tiny_experts_have_unit_gain(tmp_path: Path) -> None:
    folder = build_tiny("qwen3_vl_moe", tmp_path, hidden_size=256, intermediate_size=256)
    stored = load_file(folder / "model.safetensors")
    for part, inputs in (("gate_up_proj", 256), ("down_proj", 192)):
        assert float(stored[NAME.format(part)].std()) == pytest.approx(inputs**-0.5, rel=0.02)


def test_plan_counts_active_experts_and_their_adapters(tiny_qwen3_vl_moe: Path) -> None:
    architecture = Architecture(read_model_config(tiny_qwen3_vl_moe), "")
    experts = 8 * (384 * 128 + 128 * 192)  # of one of two layers; each token uses 2 of 8
    traced = {}
    for target in (r"mlp\.experts", "q_proj"):
        config = SFTConfig.model_validate({"lora": {"rank": 4, "targets": [target]}, "train": {"precision": "fp32"}})
        parameters = count_parameters(build_meta_model(architecture, config), config)
        assert parameters.numel - parameters.num_active == 2 * experts * 6 / 8
        assert parameters.blocks["model.language_model.layers.1."] > 4 * experts
        traced[target] = build_pieces(architecture, config, parameters).trace_text_layer(32)
        if target != "q_proj":
            assert parameters.num_trained == 2 * 4 * 8 * (384 + 128 + 128 + 192)
    more = traced[r"mlp\.experts"].peak - traced["q_proj"].peak
    assert more >= 4 * 8 * 384 * 128 + 4 * experts  # the larger gradient, and the copy to which the products are added


@pytest.mark.parametrize(
    ("pattern", "matched"), [("gate_up_proj", "gate_up_proj"), (r"experts\.down_proj", "down_proj")]
)
def test_adapters_of_experts_get_their_learning_rates(model: Any, pattern: str, matched: str) -> None:
    adapted = deepcopy(model)
    add_adapters(adapted, LoRAConfig(rank=4, targets=(r"mlp\.experts", r"q_proj$")), seed=0)
    optim = SFTConfig.model_validate({"optim": {"lr_multipliers": {pattern: 0.5}}}).optim
    multipliers = get_multipliers(dict(adapted.named_parameters()), optim)
    scaled = [name for name, factor in multipliers.items() if factor == 0.5 and is_adapter(name)]
    assert len(scaled) == 2 * 2  # two matrices in each of two layers
    weights = {get_adapted_weight(name.partition(".lora_")[0]) for name in scaled}
    assert weights == {NAME.replace("1", number).format(matched) for number in "01"}
