"""Tiny models: complete, reproducible folders with the names and tokens of the real models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from dsreason.families import FAMILIES
from dsreason.models.tiny import build_tiny, list_special_tokens

PREFIXES = {
    "qwen2_5_vl": ("model.embed_tokens.", "model.layers.", "model.norm.", "visual."),
    "qwen3_vl": ("model.language_model.", "model.visual."),
    "qwen3_5": ("model.language_model.", "model.visual.", "mtp."),
}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_transformers_loads_every_tensor_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = build_tiny(family, tmp_path)
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_tensor_names_match_published_checkpoints(family: str, tmp_path: Path) -> None:
    names = load_file(build_tiny(family, tmp_path) / "model.safetensors").keys()
    assert all(name.startswith(PREFIXES[family]) for name in names), names


def test_seed_determines_the_weights(tmp_path: Path) -> None:
    weights = [
        load_file(build_tiny("qwen2_5_vl", tmp_path / str(i), seed=seed) / "model.safetensors")
        for i, seed in enumerate((5, 5, 6))
    ]
    name = "visual.patch_embed.proj.weight"
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_random_weights_leave_global_generator_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    build_tiny("qwen2_5_vl", tmp_path)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_tokenizer_round_trips_text_and_knows_answers(family: str, tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(build_tiny(family, tmp_path))
    tokenizer = processor.tokenizer
    text = "Zwölf Äpfel fall\n\tdown 12.5 m; 落下 🍎 'it's'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [len(tokenizer(word)["input_ids"]) for word in ("red", "left", "yes", "no", "three", "A")] == [1] * 6
    assert all(len(tokenizer(token)["input_ids"]) == 1 for token in list_special_tokens(FAMILIES["qwen2_5_vl"].tokens))
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2_5_vl", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"),
        ("qwen3_vl", ""),
    ],
)
def test_chat_template_matches_qwen(family: str, expected: str, tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(build_tiny(family, tmp_path))
    content = [{"type": "image"}, {"type": "text", "text": "Is it red?"}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    user = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Is it red?<|im_end|>\n"
    assert text == expected + user + "<|im_start|>assistant\n"


def test_untied_embeddings_have_a_separate_head(tmp_path: Path) -> None:
    names = load_file(build_tiny("qwen2_5_vl", tmp_path, tie_embeddings=False) / "model.safetensors").keys()
    assert "lm_head.weight" in names


def test_shards_respect_size_and_index_is_complete(tmp_path: Path) -> None:
    full = load_file(build_tiny("qwen2_5_vl", tmp_path / "whole") / "model.safetensors")
    folder = build_tiny("qwen2_5_vl", tmp_path / "shards", max_shard_bytes=1_000_000)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == full.keys()
    assert len(set(weight_map.values())) > 1
    for file in set(weight_map.values()):
        tensors = load_file(folder / file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 1_000_000
        assert all(tensor.shape == full[name].shape for name, tensor in tensors.items())


def test_tiny_checkpoint_has_requested_dtype(tmp_path: Path) -> None:
    folder = build_tiny("qwen3_vl", tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("hidden_size", "vision_hidden_size"), [(96, 64), (128, 40)])
def test_sizes_not_divisible_into_heads_are_rejected(hidden_size: int, vision_hidden_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        build_tiny("qwen2_5_vl", tmp_path, hidden_size=hidden_size, vision_hidden_size=vision_hidden_size)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_heads_and_vocabulary_may_match_real_model(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_size": 128, "num_key_value_heads": 1, "vocabulary_size": 1000}
    folder = build_tiny(family, tmp_path, **sizes)
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    attention = model.model.language_model.layers[0].self_attn
    assert (attention.q_proj.weight.shape, attention.k_proj.weight.shape) == ((256, 256), (128, 256))
    assert sum(model.config.text_config.rope_parameters["mrope_section"]) == 128 // 2
    assert model(input_ids=torch.tensor([[3, 4, 999]])).logits.shape == (1, 3, 1000)
    assert AutoProcessor.from_pretrained(folder).tokenizer.decode([999]) == ""
