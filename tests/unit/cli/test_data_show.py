"""`dsreason data show`: rows as JSON and as text, for each trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from dsreason.cli.data.commands import app
from dsreason.errors import ConfigError

GOOD = {
    "id": 7,
    "messages": [{"role": "user", "content": "<image>Up?"}, {"role": "assistant", "content": "Yes."}],
    "image": "a.png",
}
MARKED = {"messages": [{"role": "user", "content": "Up?"}, {"role": "assistant", "content": "Yes.", "loss": False}]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [{**GOOD, "site": "north"}, MARKED])))
    return tmp_path / "rows.jsonl"


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_data_show_json_has_object_per_row(rows: Path) -> None:
    result = call(rows, "--json")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["id"] == "7"
    assert first["messages"] == [
        {
            "role": "user",
            "trained": False,
            "parts": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "Up?"}],
        },
        {"role": "assistant", "trained": True, "parts": [{"type": "text", "text": "Yes."}]},
    ]
    assert (first["answer"], first["meta"], first["chosen"]) == ("Yes.", {"site": "north"}, None)
    assert "the sample has no reply to train on" in second["error"] and "row 2" in second["error"]
    assert result.exit_code == 1


def test_data_show_marks_trained_text(rows: Path) -> None:
    result = call(rows, "--row", 1)
    assert result.exit_code == 0, result.output
    assert "image a.png (28x28)" in result.stdout
    assert "assistant (trained)" in result.stdout
    assert "uses id, image, messages; keeps site for rewards" in result.stderr


def test_data_show_for_grpo_prints_only_prompt(rows: Path) -> None:
    shown = [json.loads(line) for line in call(rows, "--json", "--for", "grpo").stdout.splitlines()]
    assert [[message["role"] for message in row["messages"]] for row in shown] == [["user"], ["user"]]


def test_data_show_for_dpo_prints_both_replies(tmp_path: Path) -> None:
    pair = {"prompt": "Up?", "chosen": "Yes.", "rejected": "No."}
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, [pair, {**pair, "rejected": "Yes."}])))
    first, second = map(json.loads, call(tmp_path / "pairs.jsonl", "--json", "--for", "dpo").stdout.splitlines())
    assert [message["role"] for message in first["messages"]] == ["user"]
    replies = [first[side][0]["parts"][0]["text"] for side in ("chosen", "rejected")]
    assert replies == ["Yes.", "No."]
    assert "the same answer" in second["error"]


def test_data_show_with_model_prints_token_counts(rows: Path) -> None:
    shown = json.loads(call(rows, "--json", "--row", 1, "--model", "tiny:qwen3_vl").stdout)
    assert set(shown["tokens"]) == {"text", "image", "video", "trained"}
    assert shown["tokens"]["image"] == 1  # 28x28 pixels become 32x32


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("--for", "world"), "--for must be one of sft, grpo, dpo"), (("--row", 3), "has only 2 rows")],
)
def test_data_show_rejects_invalid_options(rows: Path, options: tuple[object, ...], reason: str) -> None:
    result = call(rows, *options)
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "assistant", "content": "Hi."}]}, "the first message must be from the user"),
        ({"image": "empty.png", "question": "Up?", "answer": "Yes."}, "the file is empty"),
        ({"image": "page.png", "question": "Up?", "answer": "Yes."}, "not a usable image"),
        ({"image": "cut.png", "question": "Up?", "answer": "Yes."}, "not a usable image"),
        ({"video": "empty.mp4", "question": "Up?", "answer": "Yes."}, "the file is empty"),
    ],
)
def test_data_show_json_rejects_unusable_rows(rows: Path, row: dict[str, Any], reason: str) -> None:
    folder = rows.parent
    Image.effect_noise((64, 64), 90).save(folder / "cut.png")
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:1000])
    (folder / "page.png").write_text("<html>")
    for name in ("empty.png", "empty.mp4"):
        (folder / name).touch()
    rows.write_text(json.dumps(row))
    shown = json.loads(call(rows, "--json").stdout)
    assert reason in shown["error"]


def test_long_base64_is_shortened(rows: Path) -> None:
    payload = "iVBORw0KGgo" * 60
    rows.write_text(json.dumps({"question": "Up?", "answer": "Yes.", "blob": payload, "screenshot": "x"}))
    assert payload[:60] not in call(rows, "--json").stdout
    rows.write_text(json.dumps({"image": payload, "question": "Up?", "answer": "Yes."}))
    result = call(rows, "--json")
    assert payload[:60] not in result.stdout and "error" in result.stdout


def test_inspect_finds_formats_and_reports_columns(rows: Path) -> None:
    rows.write_text(json.dumps({**GOOD, "site": "north"}))
    arguments = ["inspect", "--path", str(rows), "--json", "--workers", "0", "--output", str(rows.parent / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (columns,) = json.loads(result.stdout)["columns"]
    assert (columns["used"], columns["kept"], columns["ignored"]) == (
        ["id", "image", "messages", "messages[].content", "messages[].role"],
        ["site"],
        [],
    )


def test_json_reports_columns_on_stderr(rows: Path) -> None:
    result = call(rows, "--json")
    assert "2 rows have the format conversation (recognised by messages), uses id, image, messages" in result.stderr
    assert "format" not in result.stdout


def test_nan_in_meta_is_null(rows: Path) -> None:
    rows.write_text('{"question": "Up?", "answer": "Yes.", "score": [NaN, 1.5]}')
    result = call(rows, "--json")
    assert '"meta": {"score": [null, 1.5]}' in result.stdout and "1 row has the format question" in result.stderr


def test_missing_reply_error_lists_other_columns(rows: Path) -> None:
    rows.write_text('{"prompt": "Up?", "text": "Yes.", "completion": null}')
    result = call(rows, "--row", 1)
    assert f"{rows}, row 1: the sample has no reply to train on: the row has no reply" in result.stdout
    assert "the row's other columns are text" in result.stdout


def test_file_without_usable_rows_is_reported(rows: Path) -> None:
    rows.write_text('{"text": "Up?"}\n{"text": "Down?"}')
    assert "no usable row among 2 rows" in call(rows).stderr
