"""`dsreason score`: its output, errors and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dsreason.cli.results.score import score
from dsreason.errors import ConfigError, DataError
from dsreason.evaluation.report.results import write_results
from tests.unit.evaluation.made_results import made


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(score)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for model, answers in {"big": "AAB", "small": "ABB"}.items():
        for number, answer in enumerate(answers):
            write_results(tmp_path / model / "letter", "robovqa", str(number), [made(str(number), answer=answer)])
    return tmp_path


def test_run_table_lists_datasets_and_report_paths(root: Path) -> None:
    ended = call("--results-dir", root / "big", "--no-html")
    assert ended.exit_code == 0
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert ["robovqa", "66.7%", "20.8–93.9%", "2", "3", "3", "66.7%", "3"] in rows
    assert ["all", "66.7%", "20.8–93.9%", "2", "3", "3", "66.7%", "3"] in rows
    folder = root / "big" / "letter"
    assert ended.stdout.splitlines()[-2:] == [str(folder / "summary.json"), str(folder / "report.md")]
    assert not (folder / "report.html").exists()


def test_table_has_a_row_per_run(root: Path) -> None:
    ended = call("--results-dir", root, "--no-html")
    rows = [line.split()[:2] for line in ended.stdout.splitlines() if line.split()]
    assert ["big/letter", "66.7%"] in rows
    assert ["small/letter", "33.3%"] in rows


def test_two_runs_are_compared(root: Path) -> None:
    ended = call("--results-dir", root / "big", "--compare", root / "small", "--no-html")
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert any(row[:4] == ["all", "66.7%", "33.3%", "+33.3"] and row[-3:] == ["1.0000", "1", "0"] for row in rows)
    assert "warning" not in ended.stdout


def test_different_questions_trigger_a_warning(root: Path) -> None:
    write_results(root / "small" / "letter", "robovqa", "9", [made("9")])
    ended = call("--results-dir", root / "big", "--compare", root / "small", "--no-html")
    assert "warning: the runs have different questions: 0 are only in big/letter, and 1 are only in" in ended.stdout


def test_markup_in_name_is_printed_literally(tmp_path: Path) -> None:
    write_results(tmp_path / "m" / "letter", "[red]x[/blue]", "1", [made(datasource="[red]x[/blue]")])
    assert "[red]x[/blue]" in call("--results-dir", tmp_path, "--no-html").stdout


def test_unknown_dataset_is_rejected(root: Path) -> None:
    ended = call("--results-dir", root, "--dataset", "av")
    assert isinstance(ended.exception, DataError)


def test_compat_prints_three_lines_and_writes_nothing(root: Path) -> None:
    before = sorted(root.rglob("*"))
    ended = call("--results-dir", root, "--compat")
    assert ended.stdout.splitlines() == [
        "Total samples processed across all files: 6",
        "Total samples counted as correct: 3",
        "Mean accuracy: 0.5000 (50.00%)",
    ]
    assert (ended.exit_code, ended.stderr, sorted(root.rglob("*"))) == (0, "", before)


def test_compat_ignores_existing_reports(root: Path) -> None:
    call("--results-dir", root, "--no-html")
    ended = call("--results-dir", root, "--compat")
    assert ended.stdout.startswith("Total samples processed across all files: 6\n")
    assert ended.stderr == ""


def test_compat_reports_invalid_file_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps([{"is_correct": True}]))
    (tmp_path / "2.json").write_text("[")
    ended = call("--results-dir", tmp_path, "--compat")
    assert (ended.exit_code, ended.stdout.splitlines()[-1]) == (0, "Mean accuracy: 1.0000 (100.00%)")
    assert "2.json: Expecting value" in ended.stderr


def test_compat_without_files_exits_with_1(tmp_path: Path) -> None:
    ended = call("--results-dir", tmp_path, "--compat")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr == f"No JSON files found in directory: {tmp_path}\n"


@pytest.mark.parametrize("more", [["--compare", "x"], ["--no-html"], ["--frames", "3"]])
def test_compat_rejects_other_options(root: Path, more: list[Any]) -> None:
    assert isinstance(call("--results-dir", root, "--compat", *more).exception, ConfigError)


def test_scoring_without_pictures_needs_no_torch(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dsreason.cli.results.score import score; "
        f"score(Path({str(root)!r}), no_html=True); score(Path({str(root)!r}), compat=True); "
        "assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
