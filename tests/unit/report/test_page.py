"""The pages: contents, escaping, size and damaged files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from dsreason.cli.main import app
from dsreason.errors import DataError
from dsreason.report import page
from dsreason.report.comparison import find_differences, name_runs, render_comparison
from dsreason.report.page import render_run_page, write_run_page
from dsreason.report.run_files import open_run
from dsreason.train.common.page import RunPage
from tests.unit.report.run_folder import make_answer, make_completion, write_run

METRICS = [{"step": step, "train/loss": 1.0 / step, "reward/mean": step / 10} for step in (1, 2, 3)]


def write_grpo_run(folder: Path, **options: object) -> Path:
    rollouts = {step: [make_completion("4", 1.0), make_completion("5", 0.0)] for step in (0, 2)}
    answers = {3: [make_answer(0, "4", correct=True)]}
    return write_run(
        folder, metrics=METRICS, rollouts=rollouts, answers=answers, grpo={"num_generations": 2}, **options
    )


def test_page_shows_run(tmp_path: Path) -> None:
    html = render_run_page(open_run(write_grpo_run(tmp_path / "mine")))
    assert "<h1>mine</h1>" in html and "tiny:qwen3" in html and "2,560 training" in html
    assert html.count('<article class="card group"') == 2  # the same prompt at two steps
    assert 'aria-label="total reward: training from 0.1 (step 1) to 0.3 (step 3)"' in html


def test_page_has_no_external_resources(tmp_path: Path) -> None:
    html = render_run_page(open_run(write_grpo_run(tmp_path)))
    assert "default-src 'none'" in html
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", html) == [] and "://" not in html


def test_texts_of_models_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    rollouts = {0: [make_completion(evil, 1.0, prompt=evil, reference=evil)]}
    html = render_run_page(
        open_run(write_run(tmp_path, rollouts=rollouts, answers={0: [make_answer(0, evil, correct=True)]}))
    )
    assert evil not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html


def test_pictures_beyond_limit_are_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file in files:
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file)
    rollouts = {0: [make_completion("4", 1.0, prompt=file.name, media=[str(file)]) for file in files]}
    run = open_run(write_run(tmp_path / "run", rollouts=rollouts, grpo={"num_generations": 1}))
    assert render_run_page(run).count("<img ") == 3
    monkeypatch.setattr(page, "MAX_PICTURE_BYTES", 1)
    html = render_run_page(run)
    assert html.count("<img ") == 1 and "The pictures of 2 prompts are omitted" in html


def test_unreadable_media_are_named(tmp_path: Path) -> None:
    rollouts = {0: [make_completion("4", 1.0, media=["/missing/clip.mp4"])]}
    html = render_run_page(open_run(write_run(tmp_path, rollouts=rollouts)))
    assert "/missing/clip.mp4" in html


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/step_0.jsonl", "validation/step_3.jsonl"])
@pytest.mark.parametrize("content", ["", "{", '{"step": "x"}\n', "null\n", '{"reward": NaN}\n'])
def test_damaged_file_is_left_out(tmp_path: Path, name: str, content: str) -> None:
    folder = write_grpo_run(tmp_path)
    (folder / name).write_text(content)
    html = render_run_page(open_run(folder))
    assert (f"{name}: damaged lines are left out" in html) == bool(content)


def test_folder_without_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains no config\.json"):
        open_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="does not describe a run"):
        open_run(tmp_path)


def test_page_of_real_media_is_small(tmp_path: Path) -> None:
    text = "word " * 5000
    rollouts = {s: [make_completion(text, i / 9, prompt=f"{s}") for i in range(9)] for s in range(20)}
    file = write_run_page(open_run(write_run(tmp_path, rollouts=rollouts, grpo={"num_generations": 9})))
    assert file.stat().st_size < 10_000_000
    assert "more characters are in the files of the run" in file.read_text()


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    runs = [open_run(write_run(tmp_path / name)) for name in ("a/sft", "b/sft")]
    assert [item.name for item in name_runs(runs)] == ["a/sft", "b/sft"]
    runs = [open_run(write_run(tmp_path / name)) for name in ("a/x", "b/y")]
    assert [item.name for item in name_runs(runs)] == ["x", "y"]


def test_comparison_shows_curves_and_differing_keys(tmp_path: Path) -> None:
    runs = [
        open_run(write_grpo_run(tmp_path / name, optim={"lr": lr})) for name, lr in (("slow", 1e-6), ("fast", 1e-5))
    ]
    assert find_differences(name_runs(runs)) == {"optim.lr": ["1e-06", "1e-05"]}
    html = render_comparison(runs)
    assert "total reward: training: slow from 0.1 (step 1) to 0.3 (step 3); fast from 0.1" in html


def test_command_writes_pages_and_comparison(tmp_path: Path) -> None:
    folders = [write_grpo_run(tmp_path / name) for name in ("x", "y")]
    done = CliRunner().invoke(app, ["report", *map(str, folders)])
    assert done.exit_code == 0 and done.stdout.split() == [
        f"{folders[0]}/run.html",
        f"{folders[1]}/run.html",
        f"{folders[0]}/comparison.html",
    ]
    assert all(Path(line).is_file() for line in done.stdout.split())


def test_page_is_rewritten_rarely(tmp_path: Path) -> None:
    run_page = RunPage(write_grpo_run(tmp_path))
    run_page.update()
    written = (tmp_path / "run.html").stat().st_mtime_ns
    run_page.update()  # within a hundred times the duration of the first
    assert (tmp_path / "run.html").stat().st_mtime_ns == written
    run_page.write()
    assert (tmp_path / "run.html").stat().st_mtime_ns > written


def test_damaged_record_does_not_end_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": 3}))
    run_page = RunPage(tmp_path)
    run_page.write()
    assert run_page.describe_run() == []
    assert "the page of the run could not be written" in caplog.text
