"""`dsreason reward try`: its tables, its JSON, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsreason.cli.reward.commands import app
from dsreason.errors import ConfigError, RewardError

ROWS = [
    {"id": "a", "prompt": "2 + 2?", "answer": "4", "level": 1},
    {"prompt": "3 + 3?", "answer": ["6", "six"], "level": 2},
]
FUNCTIONS = """
def words(completion, sample):
    return 0.5 * len(completion.split()), {"words": len(completion.split())}

def level(completions, level, **kwargs):
    return [None if value == 2 else float(value) for value in level]

def fails(completion, sample):
    raise ValueError("no")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "texts.jsonl").write_text('"4"\n{"completion": "six"}\n')
    (tmp_path / "run.toml").write_text(
        '[data]\nadapter = "auto"\npath = "rows.jsonl"\nname = "sums"\n'
        '[reward.functions]\nexact_match = 2.0\n"mine.py:words" = 1.0\noverlong = 1.0\n'
        '[reward.only."mine.py:words"]\nlevel = [1]\n'
    )
    return tmp_path


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["try", *arguments])
    if result.exception is not None:
        raise result.exception
    return result


def read(*arguments: str) -> list[dict[str, Any]]:
    lines = call(*arguments, "--json").stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_rewards_of_configuration_score_given_completions(folder: Path) -> None:
    first, second = read("--config", "run.toml", "--completions", "texts.jsonl")
    assert first["rewards"]["exact_match"]["value"] == 1
    assert first["rewards"]["words"]["parts"] == {"words": 1}
    assert first["total"] == 2.5
    assert (second["completion"], second["rewards"]["words"], second["total"]) == ("six", None, 2.0)
    assert "overlong" not in first["rewards"]


def test_answers_and_wrong_texts_are_scored_by_default(folder: Path) -> None:
    entries = read("--reward", "exact_match", "--reward", "mine.py:level", "--path", "rows.jsonl")
    assert [(entry["id"], entry["kind"], entry["completion"]) for entry in entries] == [
        ("a", "answer", "4"),
        ("a", "wrong", "I cannot tell."),
        ("row 2", "answer", "6"),
        ("row 2", "wrong", "I cannot tell."),
    ]
    assert [entry["rewards"]["exact_match"]["value"] for entry in entries] == [1, 0, 1, 0]
    assert [entry["rewards"]["level"]["value"] for entry in entries] == [1, 1, None, None]


def test_table_has_values_parts_and_seconds(folder: Path) -> None:
    text = call("--reward", "mine.py:words", "--path", "rows.jsonl", "--rows", "1", "--completion", "a b c").stdout
    cells = [line.split() for line in text.splitlines() if line.strip()]
    assert cells[:2] == [["words"], ["row", "id", "completion", "value", "parts", "seconds"]]
    assert cells[3][:8] == ["1", "a", "a", "b", "c", "1.5", "words", "3"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "either --config, or --reward and --path"),
        (["--reward", "format"], "specify their file with --path"),
        (["--config", "run.toml", "--path", "rows.jsonl"], "use --set data.path=rows.jsonl"),
        (["--config", "run.toml", "--completion", "a", "--completions", "texts.jsonl"], "cannot be combined"),
        (
            ["--config", "run.toml", "--rows", "1", "--completions", "texts.jsonl"],
            "2 completions, but there are 1 rows",
        ),
        (["--config", "run.toml", "--completions", "rows.jsonl"], "rows.jsonl, line 1: must be a JSON string"),
        (["--config", "run.toml", "--completions", "none.jsonl"], "none.jsonl: cannot be read"),
    ],
)
def test_unusable_options_are_named(folder: Path, arguments: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call(*arguments)


def test_failing_function_is_named_with_its_row(folder: Path) -> None:
    with pytest.raises(RewardError, match='reward "mine.py:fails", sample "a": raised ValueError: no'):
        call("--reward", "mine.py:fails", "--path", "rows.jsonl")


def test_model_samples_completions_of_each_row(folder: Path) -> None:
    model = '[model]\npath = "tiny:qwen2_5_vl"\n[rollout]\nmax_completion_length = 8\n[train]\nprecision = "fp32"\n'
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + model)
    entries = read("--config", "run.toml", "--sample", "2")
    assert [(entry["id"], entry["kind"]) for entry in entries] == [
        *[("a", "sampled")] * 2,
        *[("row 2", "sampled")] * 2,
    ]
    assert entries[0]["completion"] != entries[1]["completion"]
    assert all(entry["rewards"]["overlong"] is not None for entry in entries)
    again = read("--config", "run.toml", "--sample", "2")
    assert [entry["completion"] for entry in again] == [entry["completion"] for entry in entries]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--completion", "4", "--sample", "2"], "--completion and --sample cannot be combined; keep one of them"),
        (["--completion", "4", "--completions", "texts.jsonl"], "--completion and --completions cannot be combined"),
        (["--sample", "2"], "--sample needs the model of a run; specify its configuration with --config"),
    ],
)
def test_conflicting_origins_are_refused(options: list[str], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        call("--reward", "exact_match", "--path", "rows.jsonl", *options)


def test_functions_can_read_rank_outside_of_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (folder / "ranked.py").write_text(
        "import os\ndef rank(completion, sample):\n    return float(os.environ['RANK'])\n"
    )
    (entry,) = read("--reward", "ranked.py:rank", "--path", "rows.jsonl", "--rows", "1", "--completion", "4")
    assert entry["total"] == 0
