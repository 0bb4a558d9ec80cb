"""The sources of a model's shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsreason.config.schema import SFTConfig
from dsreason.errors import CheckpointError, ConfigError
from dsreason.tools.planning import architecture
from dsreason.tools.planning.architecture import find_architecture
from dsreason.tools.planning.parameters import build_meta_model, count_parameters
from dsreason.tools.planning.published import list_architectures
from tests.unit.tools.planning.test_parameters import CONFIG


def test_folder_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    architecture = find_architecture(str(tmp_path))
    assert architecture.config.num_hidden_layers == 2
    assert architecture.source == f"{tmp_path}/config.json"


def test_hub_takes_precedence_over_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "download_config", lambda *_: json.dumps(CONFIG).encode())
    result = find_architecture("nvidia/Cosmos-Reason1-7B")
    assert (result.config.hidden_size, result.source) == (64, "config.json of nvidia/Cosmos-Reason1-7B on the Hub")


def test_table_is_used_when_hub_is_unreachable() -> None:
    architecture = find_architecture("nvidia/cosmos-reason1-7b")
    assert architecture.config.text_config.hidden_size == 3584
    assert "built-in table" in architecture.source


def test_unknown_model_is_rejected() -> None:
    with pytest.raises(CheckpointError, match=r"model.path mine/own: .*set model.path to a folder"):
        find_architecture("mine/own")


def test_model_in_s3_is_rejected() -> None:
    with pytest.raises(ConfigError, match="copy it to a local folder"):
        find_architecture("s3://bucket/model")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3_754_622_976),
        ("nvidia/Cosmos-Reason1-7B", 8_292_166_656),
        ("Qwen/Qwen2.5-VL-32B-Instruct", 33_452_718_336),
        ("Qwen/Qwen2.5-VL-72B-Instruct", 73_410_777_344),
        ("nvidia/Cosmos-Reason2-2B", 2_127_532_032),
        ("Qwen/Qwen3-VL-4B-Instruct", 4_437_815_808),
        ("nvidia/Cosmos-Reason2-8B", 8_767_123_696),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        # text 2 x 131072 x 2048 + 28 x 50,335,744 + 2048; tower 1,180,800 + 27 x 15,239,504 + 2304; projector 76,692,992
        ("nvidia/Cosmos3-Edge", 2_435_616_496),
    ],
)
def test_published_models_have_known_parameter_counts(name: str, parameters: int) -> None:
    config = SFTConfig()
    assert count_parameters(build_meta_model(find_architecture(name), config), config).numel == parameters


def test_every_table_entry_can_be_built() -> None:
    for values in list_architectures().values():
        assert architecture.build_from_table(values).get_text_config().vocab_size in (151936, 152064, 131072, 248320)
