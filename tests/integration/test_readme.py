"""The commands of README.md, run verbatim on its files, from a row to a graded model; only sizes are reduced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.docs import PAGES, commands, write_files
from tests.integration.command import dsreason, metrics
from tests.unit.media.videos import write_video

pytestmark = [pytest.mark.integration, pytest.mark.long]

SMALL = {
    "sft": [
        "model.path=tiny:qwen3_vl",
        "train.precision=fp32",
        "train.max_steps=1",
        "train.global_batch_size=4",
        "validation.max_completion_length=4",
    ],
    "grpo": [
        "train.precision=fp32",
        "train.max_steps=1",
        "grpo.prompts_per_step=2",
        "grpo.num_generations=4",
        "rollout.engine=transformers",
        "rollout.max_completion_length=4",
        "validation.max_completion_length=4",
    ],
    "eval": ["model.engine=transformers", "generation.max_retries=0"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the README's SFT, GRPO and evaluation, and return the folder with their output."""
    folder = tmp_path_factory.mktemp("readme")
    readme = PAGES[0]
    write_files(readme, folder)
    (folder / "clips").mkdir()
    write_video(folder / "clips" / "1.mp4", 26)
    row = json.loads((folder / "my.jsonl").read_text())
    rows = [row | {"id": str(number)} for number in range(1, 11)]
    for name in ("my.jsonl", "my_test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    dsreason_result = [words[1:] for _, words in commands(readme) if words[0].endswith("dsreason")]
    assert [words[0] for words in dsreason_result] == ["sft", "grpo", "eval"]
    for words in dsreason_result:
        changes = [option for change in SMALL[words[0]] for option in ("--set", change)]
        ended = dsreason(*words, *changes, cwd=folder)
        assert ended.returncode == 0, ended.stderr
    return folder


def test_sft_and_grpo_hold_out_validation_rows(folder: Path) -> None:
    for name in ("mine", "rl"):
        assert len((folder / "outputs" / name / "validation" / "step_1.jsonl").read_text().splitlines()) == 1
        assert metrics(folder / "outputs" / name)[-1]["step"] == 1


def test_each_reward_has_metrics(folder: Path) -> None:
    last = metrics(folder / "outputs" / "rl")[-1]
    assert {"reward/exact_match/mean", "reward/format/mean", "reward/short/mean"} <= last.keys()
    assert last["reward/short/mean"] == 1.0


def test_every_test_question_is_graded(folder: Path) -> None:
    (summary,) = (folder / "results").glob("*/letter/summary.json")
    assert json.loads(summary.read_text())["accuracy"]["over_all"]["total"] == 10
    assert (summary.parent / "report.html").is_file()


@pytest.mark.parametrize(("run", "command"), [("mine", "sft"), ("rl", "grpo")])
def test_export_includes_model_card(folder: Path, run: str, command: str) -> None:
    card = ModelCard.load(folder / "outputs" / run / "export" / "final" / "README.md")
    assert card.data.tags == ["dsreason", command]
    # The base model of the README is replaced by a tiny model, which is not on the Hub.
    assert card.data.base_model is None
    assert card.data.eval_results[0].metric_value == metrics(folder / "outputs" / run)[-1]["val/accuracy"]
    assert "| optimizer steps | 1 |" in card.text


def test_exported_card_includes_evaluation_scores(folder: Path) -> None:
    options = ["--checkpoint", "outputs/rl", "--output", "scored", "--results-dir", "results"]
    ended = dsreason("export", *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    card = ModelCard.load(folder / "scored" / "README.md")
    assert [result.dataset_name for result in card.data.eval_results] == ["held-out rows", "my_test (letter)"]
    assert "accuracy, my_test (letter), 10 questions" in card.text
