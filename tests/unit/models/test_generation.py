"""Base models: training, sampling and exports end a turn with the token of the chat template."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from dsreason.checkpoints.export import write_model_folder
from dsreason.data.types import Sample
from dsreason.errors import CheckpointError
from dsreason.models.load import load_model
from dsreason.models.placement import load_where_it_fits
from dsreason.models.processors.loading import open_encoder
from dsreason.models.tiny import build_tiny
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import TransformersEngine, read_stop_token_ids
from tests.unit.models.base_model import END, TURN_END, change_json, write_base_model

QUESTION = {"role": "user", "content": "What colour?"}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("qwen3", tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture
def base(chat_model: Path, tmp_path: Path) -> Path:
    return write_base_model(chat_model, tmp_path / "base")


def test_sft_trains_turn_end_of_template(base: Path) -> None:
    encoder = open_encoder(base, dtype=torch.float32, max_length=99, max_length_key="")
    assert encoder.processor.tokenizer.eos_token == "<|endoftext|>"
    encoded = encoder.encode(Sample("1", [QUESTION, {"role": "assistant", "content": "red"}]))
    assert encoder.processor.tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == "red<|im_end|>"
    assert encoded.input_ids[encoded.loss_mask][-1] == TURN_END


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl"])
def test_stop_ids_include_turn_end(family: str, tmp_path: Path) -> None:
    folder = write_base_model(build_tiny(family, tmp_path / "chat"), tmp_path / "base")
    assert read_stop_token_ids(folder) == [END, TURN_END]
    (folder / "generation_config.json").unlink()
    assert read_stop_token_ids(folder) == [END, TURN_END]
    assert read_stop_token_ids(tmp_path / "chat") == [TURN_END, END]


def test_loaded_model_stops_at_turn_end(base: Path) -> None:
    trained = load_model(base, dtype=torch.float32)
    placed = load_where_it_fits(base, dtype=torch.float32, device=torch.device("cpu"))
    assert trained.generation_config.eos_token_id == placed.generation_config.eos_token_id == [END, TURN_END]


def test_template_without_turn_end_adds_nothing(base: Path) -> None:
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}<|endoftext|>")
    assert read_stop_token_ids(base) == [END]


@pytest.mark.parametrize("holder", ["tokenizer_config.json", "chat_template.json"])
def test_chat_template_is_found_in_json(base: Path, holder: str) -> None:
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    assert read_stop_token_ids(base) == [END]
    if not (base / holder).exists():
        (base / holder).write_text("{}")
    change_json(base / holder, lambda values: values.update(chat_template=template))
    assert read_stop_token_ids(base) == [END, TURN_END]


def test_turn_end_id_is_found_without_tokenizer_json(base: Path) -> None:
    (base / "tokenizer.json").unlink()
    added = {str(END): {"content": "<|endoftext|>"}, "500": {"content": "<|im_end|>"}}
    change_json(base / "tokenizer_config.json", lambda values: values.update(added_tokens_decoder=added))
    assert read_stop_token_ids(base) == [END, TURN_END]


@pytest.mark.parametrize("text", ["[]", "{", '{"added_tokens": 3}'])
def test_unreadable_tokenizer_is_reported(base: Path, text: str) -> None:
    (base / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="the tokenizer files cannot be read"):
        read_stop_token_ids(base)


def test_sampling_stops_at_turn_end(base: Path) -> None:
    encoder = open_encoder(base, dtype=torch.float32, max_length=99, max_length_key="")
    prompt = encoder.encode_prompt(Sample("1", [QUESTION]))
    engine = TransformersEngine(base, encoder.processor.tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    engine.load(0)
    assert engine.model is not None
    make_certain(engine.model, TURN_END)
    (completion,) = engine.generate([prompt], Sampling(max_completion_length=5), version=0)
    assert (completion.ids, completion.finish_reason) == ((TURN_END,), "stop")


def test_transformers_stops_exported_model_at_turn_end(base: Path, tmp_path: Path) -> None:
    exported = write_model_folder(load_file(base / "model.safetensors").items(), base, tmp_path / "out", dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(exported)
    make_certain(model, TURN_END)
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=5).tolist() == [[1, 2, TURN_END]]


def make_certain(model: PreTrainedModel, token: int) -> None:
    """Let the model predict only `token`."""
    bias = torch.zeros(model.lm_head.out_features)
    bias[token] = 1e4
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)


def test_exported_generation_config_includes_turn_end(base: Path, tmp_path: Path) -> None:
    before = json.loads((base / "generation_config.json").read_text())
    exported = write_model_folder([("a", torch.ones(2))], base, tmp_path / "out")
    assert json.loads((exported / "generation_config.json").read_text()) == {**before, "eos_token_id": [END, TURN_END]}


def test_export_creates_generation_config_if_missing(base: Path, tmp_path: Path) -> None:
    (base / "generation_config.json").unlink()
    exported = write_model_folder([("a", torch.ones(2))], base, tmp_path / "out")
    values = json.loads((exported / "generation_config.json").read_text())
    assert (values["eos_token_id"], values["bos_token_id"]) == ([END, TURN_END], END)
    assert "_from_model_config" not in values


@pytest.mark.parametrize("eos_token_id", [TURN_END, [TURN_END], [END, TURN_END]])
def test_export_keeps_complete_generation_config(base: Path, tmp_path: Path, eos_token_id: object) -> None:
    change_json(base / "generation_config.json", lambda values: values.update(eos_token_id=eos_token_id))
    exported = write_model_folder([("a", torch.ones(2))], base, tmp_path / "out")
    assert (exported / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
