"""The model card of an export: the header that the Hub reads, and the text for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from dsreason.checkpoints.model_card import CardScore, build_model_card

LINES = [
    {"step": 0, "val/loss": 2.0, "val/accuracy": 0.25},
    {"step": 4, "train/loss": 1.0},
    {"step": 8, "train/loss": 0.5, "val/loss": 0.75, "val/accuracy": 0.625, "val/reward/mean": None},
    {"step": 12, "val/loss": 0.5, "val/accuracy": 0.875},
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_run(
    folder: Path, *, model: str = "nvidia/Cosmos-Reason2-2B", data: dict[str, Any] | None = None, command: str = "sft"
) -> Path:
    folder.mkdir(parents=True)
    config = {"model": {"path": model}, "data": data or {"path": "nvidia/Cosmos-Reason1-SFT-Dataset"}}
    facts = {"command": [command, "--config=run.toml"], "versions": {"dsreason": "0.1.0", "torch": "2.13.0"}}
    (folder / "config.json").write_text(json.dumps({"config": config, **facts}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return folder


def card_of(run: Path, step: int = 8, **more: Any) -> ModelCard:
    return ModelCard(build_model_card(run, step, dtype="bf16", **more))


def test_card_header_has_format_of_hub() -> None:
    header = card_of(write_run(Path("mine"))).data.to_dict()
    results = header.pop("model-index")
    assert header == {
        "base_model": ["nvidia/Cosmos-Reason2-2B"],
        "base_model_relation": "finetune",
        "datasets": ["nvidia/Cosmos-Reason1-SFT-Dataset"],
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["dsreason", "sft"],
    }
    ((measured,),) = [result["results"] for result in results]
    assert results[0]["name"] == "mine"
    assert measured["dataset"]["name"] == "held-out rows"
    assert measured["metrics"] == [{"type": "accuracy", "value": 0.625}]


def test_card_lists_command_steps_scores_and_versions() -> None:
    text = card_of(write_run(Path("mine"))).text
    assert "| command | `dsreason sft --config=run.toml` |" in text
    assert "| optimizer steps | 8 |" in text
    assert "| val/loss | 0.75 |" in text
    assert "val/reward/mean" not in text
    assert "dsreason 0.1.0, torch 2.13.0" in text
    assert "This card does not specify a license" in text


@pytest.mark.parametrize(("step", "value"), [(0, 0.25), (7, 0.25), (8, 0.625), (100, 0.875)])
def test_card_uses_last_validation_up_to_step(step: int, value: float) -> None:
    (result,) = card_of(write_run(Path("mine")), step).data.eval_results
    assert result.metric_value == value


def test_evaluation_scores_appear_in_header_and_text() -> None:
    card = card_of(write_run(Path("mine")), scores=[CardScore("robovqa", "letter", 0.73109, 110)])
    assert [(result.dataset_name, result.metric_value) for result in card.data.eval_results] == [
        ("held-out rows", 0.625),
        ("robovqa (letter)", 0.7311),
    ]
    assert "| accuracy, robovqa (letter), 110 questions | 0.7311 |" in card.text


@pytest.mark.parametrize(
    "path", ["tiny:qwen3_vl", "s3://bucket/model", "outputs/mine/export/final", "gone.json", "local/model"]
)
def test_models_and_datasets_outside_hub_are_omitted(path: str) -> None:
    Path("local/model").mkdir(parents=True)
    card = card_of(write_run(Path("run"), model=path, data={"path": path}))
    assert (card.data.base_model, card.data.datasets) == (None, None)
    assert "| base model | not on the Hugging Face Hub |" in card.text


def test_each_source_is_named_once() -> None:
    sources = [{"path": "a/one"}, {"path": "rows.jsonl"}, {"path": "a/two"}, {"path": "a/one"}]
    assert card_of(write_run(Path("run"), data={"sources": sources})).data.datasets == ["a/one", "a/two"]


def test_grpo_on_exported_model_names_its_origin() -> None:
    first = write_run(Path("mine"))
    Path("mine/export/final").mkdir(parents=True)
    Path("mine/export/final/README.md").write_text(str(card_of(first)))
    card = card_of(write_run(Path("rl"), model="mine/export/final", data={"path": "a/rl"}, command="grpo"))
    assert card.data.base_model == ["nvidia/Cosmos-Reason2-2B"]
    assert card.data.datasets == ["nvidia/Cosmos-Reason1-SFT-Dataset", "a/rl"]
    assert card.data.tags == ["dsreason", "grpo"]


@pytest.mark.parametrize(
    "text", ["---\nbase_model: Qwen/Qwen2.5-VL-7B\n---\n# Another", "no header", "---\ntags: 3\n---\n"]
)
def test_unrelated_local_model_card_is_ignored(text: str) -> None:
    Path("downloaded").mkdir()
    Path("downloaded/README.md").write_text(text)
    assert card_of(write_run(Path("run"), model="downloaded")).data.base_model is None


@pytest.mark.parametrize("record", [None, "", "{", "[]", '{"model_type": "qwen3_vl"}'])
def test_unreadable_run_record_gives_a_short_card(record: str | None) -> None:
    Path("bare").mkdir()
    if record is not None:
        Path("bare/config.json").write_text(record)
    card = card_of(Path("bare"))
    assert card.data.tags == ["dsreason"]
    assert card.data.eval_results is None
    assert "| optimizer steps | 8 |" in card.text


def test_truncated_line_ends_the_metrics() -> None:
    run = write_run(Path("mine"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "val/acc')
    (result,) = card_of(run, 16).data.eval_results
    assert result.metric_value == 0.875


def test_pipe_in_command_is_escaped() -> None:
    text = card_of(write_run(Path("mine"), command="sft|x")).text
    assert "| command | `dsreason 'sft\\|x' --config=run.toml` |" in text


def test_unreadable_config_is_omitted_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(Path("mine"))
    (run / "config.json").write_text("{")
    assert "base_model" not in card_of(run).data.to_dict()
    assert "mine/config.json: is not the configuration of a run (Expecting property name" in caplog.text
    assert "the model card omits it" in caplog.text
