"""User mistakes end with one clear message and exit code 2, before a model is loaded or a rank is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.cli.main import main
from tests.unit.media.videos import write_video

pytestmark = pytest.mark.integration

ROWS = [{"id": str(i), "image": "red.png", "question": "What colour?", "answer": "red"} for i in range(8)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_qwen2_5_vl: Path) -> Path:
    """Create a folder with a valid configuration, eight rows and the image that they use."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.full((56, 56, 3), 200, np.uint8)).save("red.png")
    write_rows(ROWS)
    Path("run.toml").write_text(
        f'[model]\npath = "{tiny_qwen2_5_vl}"\n[data]\nadapter = "jsonl"\npath = "rows.jsonl"\n'
        '[train]\nglobal_batch_size = 4\nprecision = "fp32"\n'
    )
    return tmp_path


def write_rows(rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Run `dsreason sft --config run.toml --dry-run …`; return the exit code and stderr."""
    monkeypatch.setattr(
        sys, "argv", ["dsreason", "sft", "--config", "run.toml", "--output-dir", "D", "--dry-run", *options]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


def test_valid_project_passes_dry_run(project, monkeypatch, capsys):
    assert run(monkeypatch, capsys)[0] == 0
    assert not (project / "D").exists()


def break_config(key: str) -> None:
    path = Path("run.toml")
    path.write_text(path.read_text() + f"[optim]\n{key}\n")


def missing_media() -> None:
    write_rows([*ROWS[:5], {**ROWS[5], "image": "gone.png"}, *ROWS[6:]])


def corrupt_video() -> None:
    write_video(Path("cut.mp4"))
    Path("cut.mp4").write_bytes(Path("cut.mp4").read_bytes()[:500])
    write_rows([*ROWS[:3], {"id": "3", "video": "cut.mp4", "question": "?", "answer": "red"}, *ROWS[4:]])


def wrong_tag_count() -> None:
    turns = [{"from": "human", "value": "<image><image>What?"}, {"from": "gpt", "value": "red"}]
    Path("llava.json").write_text(json.dumps([{"id": "a", "image": "red.png", "conversations": turns}] * 4))


def deepspeed_contradiction() -> None:
    Path("mine.json").write_text(json.dumps({"train_batch_size": 99, "zero_optimization": {"stage": 3}}))


def deepspeed_value() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpuu"}}
    Path("mine.json").write_text(json.dumps({"zero_optimization": zero}))


def other_run() -> None:
    Path("D").mkdir()
    Path("D/config.json").write_text("{}")


def file_as_folder() -> None:
    Path("file").write_text("")


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (lambda: break_config("learning_rate = 1e-5"), [], ["run.toml", "learning_rate", "lr"]),
        (deepspeed_contradiction, ["--ds-config", "mine.json"], ["mine.json", "train_batch_size", "99", "4"]),
        (missing_media, [], ["rows.jsonl", "6", "gone.png"]),
        (corrupt_video, [], ["rows.jsonl", "4", "cut.mp4"]),
        (
            wrong_tag_count,
            ["--set", "data.adapter=llava", "--set", "data.path=llava.json"],
            ["llava.json", "2 <image> tags", "1 image"],
        ),
        (lambda: write_rows([]), [], ["rows.jsonl", "empty"]),
        (lambda: write_rows(ROWS[:3]), [], ["3 rows", "4"]),
        (lambda: None, ["--set", 'model.freeze=["visul"]'], ["visul"]),
        (lambda: None, ["--set", "data.vision.fps=2", "--set", "data.vision.nframes=4"], ["fps", "nframes"]),
        (lambda: None, ["--set", "model.max_length=8"], ["rows.jsonl", "8"]),
        (lambda: None, ["--set", "model.path=./nowhere"], ["./nowhere"]),
        (lambda: None, ["--set", "data.adapter=jsnl"], ["jsnl", "jsonl"]),
        (other_run, [], ["D", "--resume"]),
        (lambda: None, ["--set", 'model.freeze=["."]'], ["freezes all"]),
        (
            lambda: None,
            ["--set", "train.max_tokens_per_micro_batch=9"],
            ["rows.jsonl", "9 (train.max_tokens_per_micro_batch)"],
        ),
        (lambda: None, ["--resume", "."], ["--resume .", "no complete checkpoint"]),
        (deepspeed_value, ["--ds-config", "mine.json"], ["mine.json", "offload_optimizer.device", "cpuu"]),
        (file_as_folder, ["--output-dir", "file/D"], ["file"]),
    ],
    ids=[
        "unknown key",
        "contradicting DeepSpeed JSON",
        "missing media",
        "corrupt video",
        "wrong tag count",
        "empty data set",
        "fewer rows than one batch",
        "unmatched freeze pattern",
        "fps and nframes",
        "sample too long",
        "no model",
        "no adapter",
        "folder of another run",
        "nothing left to train",
        "sample beyond the token budget",
        "nothing to resume from",
        "value that DeepSpeed rejects",
        "folder that cannot be created",
    ],
)
def test_mistake_is_reported_with_exit_code_2(project, monkeypatch, capsys, spoil, options, words):
    spoil()
    code, text = run(monkeypatch, capsys, *options)
    assert code == 2
    assert "Traceback" not in text
    assert [word for word in words if word not in text] == [], text
    assert text.count("error:") == 1
