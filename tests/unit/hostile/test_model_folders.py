"""Invalid numbers in a model's config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsreason.errors import CheckpointError
from dsreason.models.load import read_model_config
from dsreason.models.processors.loading import load_processor
from dsreason.models.tiny import build_tiny
from dsreason.rollout.transformers_engine import read_stop_token_ids
from tests.unit.hostile.guard import guarded, refused
from tests.unit.hostile.inputs import change_json

FIELDS = {
    "qwen2_5_vl": [
        *("text_config.hidden_size", "text_config.num_attention_heads", "text_config.num_key_value_heads"),
        *("text_config.intermediate_size", "text_config.vocab_size", "vision_config.depth", "vision_config.num_heads"),
        *("vision_config.hidden_size", "vision_config.patch_size", "vision_config.window_size"),
    ],
    "qwen3_vl": [
        *("text_config.head_dim", "vision_config.num_heads", "vision_config.spatial_merge_size"),
        *("vision_config.num_position_embeddings", "vision_config.out_hidden_size"),
    ],
    "qwen3": ["hidden_size", "num_attention_heads", "vocab_size"],
}
VALUES = {"0": 0, "-1": -1, "10^9": 10**9, "10^400": 10**400, "true": True, "text": "", "list": [], "2.5": 2.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: build_tiny(family, folder / family) for family in FIELDS}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(
    ("family", "field"), [(family, field) for family, fields in FIELDS.items() for field in fields]
)
def test_impossible_model_size_is_rejected_by_name(
    here: Path, folders: dict[str, Path], family: str, field: str, value: Any
) -> None:
    config = json.loads((folders[family] / "config.json").read_text())
    *sections, name = field.split(".")
    section = config
    for inner in sections:
        section = section[inner]
    assert name in section
    section[name] = value
    (here / "model").mkdir()
    (here / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        guarded(lambda: read_model_config(here / "model"))
    assert str(error.value).startswith(f"{here / 'model'}: config.json ")
    assert name in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("family", FIELDS)
def test_sizes_of_real_models_are_accepted(here: Path, folders: dict[str, Path], family: str) -> None:
    shutil.copy(folders[family] / "config.json", here)
    assert read_model_config(here).model_type


@pytest.mark.parametrize("value", [None, [], "x", -1, [[1]], [1, None], True, 1.5], ids=str)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_invalid_eos_token_id_is_rejected(here: Path, folders: dict[str, Path], file: str, value: Any) -> None:
    shutil.copytree(folders["qwen3_vl"], here / "model")
    if file == "config.json":
        (here / "model/generation_config.json").unlink()
    change_json(here / "model" / file, lambda values: values.pop("eos_token_id", None))
    change_json(here / "model" / file, lambda values: values.get("text_config", values).update(eos_token_id=value))
    refused(
        lambda: read_stop_token_ids(here / "model"), CheckpointError, f"{here / 'model'}: eos_token_id in {file} is"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"cache_implementation": "x"}', '{"watermarking_config": 3}'])
def test_unreadable_generation_config_is_reported(here: Path, folders: dict[str, Path], text: str) -> None:
    shutil.copytree(folders["qwen3_vl"], here / "model")
    (here / "model/generation_config.json").write_text(text)
    refused(lambda: read_stop_token_ids(here / "model"), CheckpointError, "generation_config.json cannot be read")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("image_mean", value, "three numbers") for value in ("x", [1, 1], [1, 1, 1, 1], [1, 1, "x"], None)),
        *(("image_std", value, "three numbers above 0") for value in ([0, 0, 0], [1, 1, -1], ["nan"] * 3)),
        *(("rescale_factor", value, "a number above 0") for value in ("x", 0, None, [1])),
    ],
)
def test_invalid_pixel_scaling_is_rejected(
    here: Path, folders: dict[str, Path], name: str, value: Any, words: str
) -> None:
    shutil.copytree(folders["qwen3_vl"], here / "model")
    change_json(here / "model/processor_config.json", lambda found: found["image_processor"].update({name: value}))
    refused(lambda: load_processor(here / "model"), CheckpointError, f"{here / 'model'}: ", f"has {name} ", words)


@pytest.mark.parametrize("value", ["x", -1, 0, [1], True], ids=str)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
def test_invalid_model_max_length_is_rejected(here: Path, folders: dict[str, Path], family: str, value: Any) -> None:
    shutil.copytree(folders[family], here / "model")
    change_json(here / "model/tokenizer_config.json", lambda found: found.update(model_max_length=value))
    refused(lambda: load_processor(here / "model"), CheckpointError, f"{here / 'model'}: ", "model_max_length")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("mrope_section", value) for value in ([1, 2], "x", [1, 2, 0], [1, 2, 3.5], {})),
        ("dtype", {"a": 1}),
    ],
)
def test_invalid_rope_or_dtype_setting_is_named(here: Path, folders: dict[str, Path], name: str, value: Any) -> None:
    shutil.copytree(folders["qwen2_5_vl"], here / "model")

    def change(found: dict[str, Any]) -> None:
        (found if name == "dtype" else found["text_config"]["rope_parameters"])[name] = value

    change_json(here / "model/config.json", change)
    refused(lambda: read_model_config(here / "model"), CheckpointError, f"{here / 'model'}: config.json ", name)
