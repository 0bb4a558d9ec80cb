"""Loading of model folders, and the errors for invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dsreason.config.schema import ModelConfig
from dsreason.errors import CheckpointError
from dsreason.models.attention import TEXT, VISION
from dsreason.models.load import load_model, read_model_config, read_parameter_names, resolve_model
from dsreason.models.processors.loading import load_processor
from dsreason.models.tiny import build_tiny

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
EMBEDDING = "model.language_model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Qwen2.5-VL with tied weights in one file, for tests that damage it."""
    return build_tiny("qwen2_5_vl", tmp_path / "model", hidden_size=64, num_layers=1, vision_depth=1)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    file = folder / "model.safetensors"
    save_file({name: t.clone() for name, t in change(load_file(file)).items()}, file, metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **values: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def assert_same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        dsreason_result, reference = dict(getattr(model, kind)()), dict(getattr(other, kind)())
        assert dsreason_result.keys() == reference.keys()
        for name, tensor in dsreason_result.items():
            assert tensor.dtype == reference[name].dtype, name
            assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_buffers_match_from_pretrained(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype) -> None:
    folder = build_tiny(family, tmp_path / "model", tie_embeddings=tied, max_shard_bytes=1 << 20)
    assert (folder / "model.safetensors.index.json").is_file()
    model = load_model(folder, dtype=dtype)
    other = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    assert_same(model, other)
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == tied
    assert model.config.to_dict() == other.config.to_dict()
    assert model.generation_config.to_dict() == other.generation_config.to_dict()
    assert sorted(read_parameter_names(folder)) == sorted(dict(model.named_parameters()))


def test_changing_loaded_model_keeps_files_unchanged(tiny: Path) -> None:
    before = (tiny / "model.safetensors").read_bytes()
    with torch.no_grad():
        for parameter in load_model(tiny, dtype=torch.float32).parameters():
            parameter.add_(1)
    assert (tiny / "model.safetensors").read_bytes() == before


def test_checkpoint_with_in_memory_names_loads_identically(tiny: Path) -> None:
    expected = load_model(tiny, dtype=torch.float32)
    file = tiny / "model.safetensors"
    published = set(load_file(file))
    rewrite(tiny, lambda _: {name: p.detach() for name, p in expected.named_parameters()})
    assert set(load_file(file)) != published
    assert_same(load_model(tiny, dtype=torch.float32), expected)


def test_tied_checkpoint_accepts_equal_lm_head(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    model = load_model(tiny, dtype=torch.float32)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert "lm_head.weight" not in read_parameter_names(tiny)


def test_tied_checkpoint_rejects_different_lm_head(tiny: Path) -> None:
    rewrite(tiny, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings = true, but lm_head.weight differs"):
        load_model(tiny, dtype=torch.float32)


def test_every_wrong_tensor_is_listed(tiny: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        del tensors["model.norm.weight"]
        tensors["model.extra.weight"] = torch.zeros(1)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 3)
        return tensors

    with pytest.raises(CheckpointError) as error:
        load_model(rewrite(tiny, spoil), dtype=torch.float32)
    assert "1 missing: model.language_model.norm.weight" in str(error.value)
    assert "1 unexpected: model.language_model.extra.weight" in str(error.value)
    expected = "model.language_model.layers.0.mlp.up_proj.weight has [2, 3], but config.json requires [128, 64]"
    assert f"1 with a different shape: {expected}" in str(error.value)


def test_untied_model_requires_an_lm_head(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_model(edit_config(tiny, tie_word_embeddings=False), dtype=torch.float32)


@pytest.mark.parametrize("kept", [0, 4, 5000])
def test_truncated_file_is_named(tiny: Path, kept: int) -> None:
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        load_model(tiny, dtype=torch.float32)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = build_tiny("qwen2_5_vl", tmp_path / "model", max_shard_bytes=1 << 20)
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_model(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is damaged"), ("{}", "is damaged"), ('{"weight_map": {"a": "../b.safetensors"}}', "outside its folder")],
)
def test_invalid_index_is_rejected(tiny: Path, content: str, message: str) -> None:
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"index.json.*{message}"):
        load_model(tiny, dtype=torch.float32)


def test_pickled_weights_are_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\).*convert"):
        load_model(tiny, dtype=torch.float32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, r"'llama' is not supported; use a model of one of these families: .*qwen2_5_vl"),
        ({"model_type": "no such"}, "config.json cannot be read"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_untrainable_model_is_rejected(tiny: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_config(edit_config(tiny, **values))


def test_missing_chat_template_is_rejected(tiny: Path) -> None:
    for file in tiny.glob("chat_template*"):
        file.unlink()
    tokenizer = tiny / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": None}))
    with pytest.raises(CheckpointError, match="the chat template is missing"):
        load_processor(tiny)


def test_missing_tokenizer_is_rejected(tiny: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer has id \w+ for image placeholders, but config\.json has \d+"):
        load_processor(tiny)


def test_missing_image_processor_is_rejected(tiny: Path) -> None:
    for file in tiny.glob("*processor*.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match="tokenizer or processor cannot be loaded"):
        load_processor(tiny)


def test_processor_loads_from_folder(folder: Path) -> None:
    assert (
        load_processor(folder).tokenizer.convert_tokens_to_ids("<|image_pad|>")
        == read_model_config(folder).image_token_id
    )


def test_missing_flash_attention_is_rejected(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="model.attention = 'flash_attention_2'"):
        load_model(tiny, dtype=torch.float32, attention="flash_attention_2")


@pytest.mark.parametrize(
    ("attention", "text", "vision"), [("auto", TEXT, VISION), ("sdpa", "sdpa", "sdpa"), ("eager", "eager", "eager")]
)
def test_attention_auto_selects_dsreason_attention(tiny: Path, attention: str, text: str, vision: str) -> None:
    config = load_model(tiny, dtype=torch.float32, attention=attention).config
    assert config.text_config._attn_implementation == text
    assert config.vision_config._attn_implementation == vision
    assert not {TEXT, VISION} & set(str(config.to_dict()).split("'"))  # dsreason's names must not appear in exports


def test_tiny_model_is_built_once(tmp_path: Path) -> None:
    config = ModelConfig(path="tiny:qwen3_vl")
    folder = resolve_model(config, tmp_path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(config, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert {entry.name for entry in tmp_path.iterdir()} == {folder.name, ".locks", ".records"}


def test_local_folder_is_used_unchanged(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(ModelConfig(path=str(folder)), tmp_path) == folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tiny:llama", "the tiny model must be one of tiny:qwen2_5_vl, tiny:qwen3_vl"),
        ("./no/such/folder", "the folder does not exist"),
        ("/no/such/folder", "the folder does not exist"),
        ("a/b/c", "the folder does not exist"),
        ("", "model.path"),
    ],
)
def test_missing_path_is_rejected(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_model(ModelConfig(path=path), tmp_path)


def test_folder_without_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config.json"):
        resolve_model(ModelConfig(path=str(tmp_path)), tmp_path)


def test_hub_download_uses_revision_and_skips_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(name: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        calls.append((name, revision))
        assert ignore_patterns == ["*/*.safetensors"]
        (tmp_path / "config.json").touch()
        assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("dsreason.files.hub.snapshot_download", download)
    assert resolve_model(ModelConfig(path="nvidia/Cosmos-Reason1-7B", revision="v1"), tmp_path) == tmp_path
    assert calls == [("nvidia/Cosmos-Reason1-7B", "v1")]


def test_unreachable_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="model.path some/model: is not a local folder"):
        resolve_model(ModelConfig(path="some/model"), tmp_path)
