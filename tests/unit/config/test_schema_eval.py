"""Evaluation configurations: cosmos-reason1's YAML, dsreason's TOML, and contradictory settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsreason.config.load import dump_config, load_config
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.shipped import list_shipped
from dsreason.errors import ConfigError

COSMOS_YAML = """\
datasets:
  - robovqa
  - av
model:
  model_name: nvidia/Cosmos-Reason1-7B
  tokenizer_model_name: qwen2.5-vl-7b
  dtype: bfloat16
  tp_size: 4
  max_length: 128000
evaluation:
  answer_type: reasoning
  num_processes: 80
  skip_saved: false
  fps: 4
  seed: 1
generation:
  max_retries: 10
  max_tokens: 1024
  temperature: 0.6
  repetition_penalty: 1.0
  presence_penalty: 0.0
  frequency_penalty: 0.0
"""
MINIMAL = 'datasets = ["robovqa"]\nmodel.path = "m"\n'


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str, name: str = "eval.toml") -> EvalConfig:
    Path(name).write_text(text)
    return load_config(EvalConfig, Path(name), overrides, default_recipe="eval_cosmos_reason1.toml")


def load_cosmos(*overrides: str) -> EvalConfig:
    return load(COSMOS_YAML, *overrides, name="evaluate.yaml")


def error(text: str, *overrides: str, name: str = "eval.toml") -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides, name=name)
    return str(caught.value)


# ---------------------------------------------------------------- cosmos-reason1's file


def test_cosmos_reason1s_yaml_loads_unchanged() -> None:
    config = load_cosmos()
    assert config.datasets == ("robovqa", "av")
    assert (config.model.path, config.model.tensor_parallel_size) == ("nvidia/Cosmos-Reason1-7B", 4)
    assert (config.model.dtype, config.model.max_length) == ("bfloat16", 128000)
    assert (config.evaluation.answer_type, config.evaluation.fps, config.evaluation.seed) == ("reasoning", 4.0, 1)
    assert (config.generation.max_retries, config.generation.max_tokens) == (10, 1024)
    assert config.generation.temperature == 0.6


def test_accepted_but_unused_settings_are_noted() -> None:
    assert load_cosmos().notes(num_cores=16) == [
        "model.tokenizer_model_name (qwen2.5-vl-7b) is ignored: the model's own tokenizer is used",
        "evaluation.num_processes is 80, but only 16 are used, one per core",
        "evaluation.skip_saved (False) is ignored: saved answers are kept",
    ]
    assert load(MINIMAL).notes(num_cores=2) == []
    assert load_cosmos("evaluation.overwrite=true", "evaluation.skip_saved=true").notes(num_cores=80)[1:] == [
        "evaluation.skip_saved (True) is ignored: saved answers are deleted, because evaluation.overwrite is set"
    ]


def test_unused_temperature_of_letter_answers_is_noted() -> None:
    assert load_cosmos("evaluation.answer_type=letter").notes(num_cores=80)[-1] == (
        "generation.temperature (0.6) is used only with answer_type = reasoning: letter always picks the most probable token"
    )


def test_scorer_without_threshold_is_noted_with_key() -> None:
    [note] = load(MINIMAL, "evaluation.scorer=format").notes(num_cores=2)
    assert note == (
        "evaluation.scorer (format) does not affect correctness, which depends on the kind of question; "
        "to let the scorer decide, set evaluation.scorer_threshold to the minimum score of a correct answer"
    )
    decides = load(MINIMAL, "evaluation.scorer=exact_match", "evaluation.scorer_threshold=1")
    assert (decides.evaluation.scorer_threshold, decides.notes(num_cores=2)) == (1.0, [])
    [note] = load(MINIMAL, "evaluation.scorer=format", "evaluation.parser=compat").notes(num_cores=2)
    assert "compat, answers are graded as in cosmos-reason1" in note


def test_threshold_without_scorer_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"scorer_threshold \(0.5\) requires evaluation.scorer, which is not set"):
        load(MINIMAL, "evaluation.scorer_threshold=0.5")


@pytest.mark.parametrize(("asked", "cores", "used"), [("80", 16, 16), ("3", 16, 3), ("null", 16, 16), ("8", 1, 1)])
def test_decoding_workers_are_limited_to_cores(asked: str, cores: int, used: int) -> None:
    assert load(MINIMAL, f"evaluation.num_processes={asked}").workers(cores) == used


@pytest.mark.parametrize("key", ["model.path", "model.model_name"])
def test_set_overrides_model_under_either_name(key: str) -> None:
    assert load_cosmos(f"{key}=mine").model.path == "mine"
    assert load(MINIMAL, f"{key}=mine").model.path == "mine"


def test_conflicting_names_of_one_setting_are_rejected() -> None:
    text = 'datasets = ["a"]\n[model]\npath = "a"\nmodel_name = "{}"'
    assert error(text.format("b")) == (
        "eval.toml: model: path ('a') and model_name ('b') are two names of the same key, but "
        "have different values; remove one"
    )
    assert load(text.format("a")).model.path == "a"


def test_errors_use_key_name_of_file() -> None:
    text = COSMOS_YAML.replace("tp_size: 4", "tp_size: 0")
    assert error(text, name="evaluate.yaml") == "evaluate.yaml: model.tp_size: must be at least 1; got 0"


def test_a_resolved_configuration_loads_again() -> None:
    config = load_cosmos()
    assert EvalConfig.model_validate(dump_config(config)) == config


def test_every_shipped_eval_recipe_loads() -> None:
    names = [name for name in list_shipped("launch/recipes") if name.startswith("eval_")]
    assert names
    for name in names:
        load_config(EvalConfig, Path(name), default_recipe=name)


# ---------------------------------------------------------------- contradictions and unknown keys


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.pth=x"], "--set model.pth=x: model.pth: unknown key; did you mean model.path?"),
        (
            ["evaluation.answer_typ=letter"],
            "--set evaluation.answer_typ=letter: evaluation.answer_typ: unknown key; "
            "did you mean evaluation.answer_type?",
        ),
        (
            ["evaluation.temperature=1"],
            "--set evaluation.temperature=1: evaluation.temperature: unknown key; did you mean generation.temperature?",
        ),
        (["evaluation.limit=0"], "--set evaluation.limit=0: evaluation.limit: must be at least 1; got 0"),
        (
            ["evaluation.answer_type=reason"],
            "--set evaluation.answer_type=reason: evaluation.answer_type: must be one of letter, reasoning; got 'reason'; "
            "did you mean reasoning?",
        ),
        (
            ["datasets=[]"],
            "eval.toml: datasets and sources are both empty; set datasets to a list such as [robovqa], or add sources",
        ),
        (["model.path=null"], "eval.toml: neither model.path nor server.url is set; set one of them"),
        (
            ["server.url=http://s:1"],
            "eval.toml: server.url (http://s:1) and model.path (m) are mutually exclusive, because the server has its own "
            "model; remove one (server.model selects the model on the server)",
        ),
        (
            ["server.url=http://s:1", "model.path=null", "model.engine=vllm"],
            "eval.toml: server.url (http://s:1) and model.engine (vllm) are mutually exclusive; remove one",
        ),
        (
            ["datasets=['a', 'a']"],
            "eval.toml: duplicate names of data sets: a; remove one, or set another name for a source",
        ),
        (
            ["datasets=['x/../y']"],
            "eval.toml: 'x/../y' cannot be used as the name of a results folder; choose a name without slashes or a leading dot",
        ),
        (
            ["datasets=['..']"],
            "eval.toml: '..' cannot be used as the name of a results folder; choose a name without slashes or a leading dot",
        ),
        (
            ["vision.min_frames=8", "sources=[{path='r.jsonl', vision.max_frames=4}]"],
            "eval.toml: vision of source r, combined with [vision]: min_frames (8) is greater than max_frames (4); "
            "correct one of them",
        ),
    ],
)  # fmt: skip
def test_contradiction_is_rejected_with_both_values(overrides: list[str], text: str) -> None:
    assert error(MINIMAL, *overrides) == text


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("localhost:8000", "must be the URL of a server, such as http://localhost:8000/v1; got 'localhost:8000'"),
        ("http://h:80a/v1", "must be the URL of a server, such as http://localhost:8000/v1; got 'http://h:80a/v1'"),
        ("http://h:99999", "must be the URL of a server, such as http://localhost:8000/v1; got 'http://h:99999'"),
        ("http://", "must be the URL of a server, such as http://localhost:8000/v1; got 'http://'"),
        ("http://h:0", "must be the URL of a server, such as http://localhost:8000/v1; got 'http://h:0'"),
        ("http:h:80/v1", "must be the URL of a server, such as http://localhost:8000/v1; got 'http:h:80/v1'"),
        ("http:/h/v1", "must be the URL of a server, such as http://localhost:8000/v1; got 'http:/h/v1'"),
        ("http://me:secret@s:1", "contains a password, which would be written to the results; remove it, and use api_key_env"),
    ],
)  # fmt: skip
def test_invalid_server_url_is_rejected(url: str, text: str) -> None:
    result = error(f'datasets = ["a"]\nserver.url = "{url}"')
    assert result == f"eval.toml: server.url: {text}"
    assert "secret" not in result


# ---------------------------------------------------------------- what is derived


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"path": "some/questions.jsonl"}, "questions"),
        ({"path": "some/questions.jsonl", "name": "mine"}, "mine"),
        ({"path": "hub/Cosmos-Reason1-Benchmark", "subset": "agibot"}, "agibot"),
        ({"adapter": "builtin"}, "builtin"),
        ({"adapter": "own/adapter.py:Rows"}, "adapter"),
    ],
)
def test_source_name_is_subset_file_or_adapter(source: dict[str, Any], name: str) -> None:
    config = EvalConfig.model_validate({"sources": [source], "model": {"path": "m"}})
    assert config.sources[0].dataset == name


@pytest.mark.parametrize(
    ("common", "own", "expected"),
    [
        ({}, {}, {"fps": 4.0}),
        ({"fps": 2}, {}, {"fps": 2.0}),
        ({"nframes": 8}, {}, {"nframes": 8}),
        ({"fps": 2}, {"nframes": 8}, {"nframes": 8}),
        ({"nframes": 8, "max_pixels": 100}, {"fps": 1}, {"fps": 1.0, "max_pixels": 100}),
        ({"max_pixels": 100}, {"max_pixels": 50}, {"fps": 4.0, "max_pixels": 50}),
    ],
)
def test_source_vision_overrides_common_vision_settings(
    common: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    document = {"sources": [{"path": "r.jsonl", "vision": own}], "model": {"path": "m"}, "vision": common}
    config = EvalConfig.model_validate(document)
    assert config.merge_vision(config.sources[0].vision).model_dump(exclude_none=True) == expected


def test_single_dataset_needs_no_list() -> None:
    assert load(MINIMAL, "datasets=av").datasets == ("av",)
