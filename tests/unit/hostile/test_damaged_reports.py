"""Files that a run or an evaluation writes and reads again, each damaged in every way.

A damaged file is either skipped with one warning that names it, or ends the command with an error that names it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dsreason.checkpoints.model_card import build_model_card
from dsreason.checkpoints.trained_vision import read_run_vision
from dsreason.cli import eval as eval_command
from dsreason.config.output import find_run_record, read_run_config, write_run_config
from dsreason.config.schema import SFTConfig
from dsreason.errors import DsReasonError
from dsreason.evaluation.report.report import write_reports
from dsreason.evaluation.report.results import write_results
from dsreason.files.address import parse_target
from dsreason.monitor.sinks.json_lines import JSONLines
from dsreason.monitor.sinks.wandb import read_run_id
from dsreason.storage.uploads import RECORD, Uploader
from dsreason.train.common.answers import write_rows
from dsreason.train.common.run_folder import compare_rows
from dsreason.train.dpo.reference import open_stored
from dsreason.world.evaluation.history import write_run_page
from dsreason.world.evaluation.report import write_report
from dsreason.world.evaluation.results import ClipResult, open_results, write_clip
from tests.unit.evaluation.made_results import made

Damage = Callable[[Path], object]


def as_folder(file: Path) -> None:
    file.unlink()
    (file / "inner").mkdir(parents=True)


def as_circle(file: Path) -> None:
    """Replace the file with a link to itself, which not even root can open."""
    file.unlink()
    file.symlink_to(file.name)


def replaced(pattern: bytes, new: bytes) -> Damage:
    """Replace the first match of `pattern` in the file."""

    def damage(file: Path) -> None:
        file.write_bytes(re.sub(pattern, new, file.read_bytes(), count=1))

    return damage


NUMBER = rb"(?<=[:\[] )-?\d+(\.\d+)?"
DAMAGES: dict[str, Damage] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 - 3]),
    "without a field": replaced(rb'"[\w/]+": ("[^"]*"|[\d.]+), ', b""),
    "NaN": replaced(NUMBER, b"NaN"),
    "infinite": replaced(NUMBER, b"1e999"),
    "a text for a number": replaced(NUMBER, b'"many"'),
    "a number of 5000 digits": replaced(NUMBER, b"7" * 5000),
    "a number for a text": replaced(rb': "[^"]*"', b": 7"),
    "null for an object": replaced(rb': \{"[^{}]*\}', b": null"),
    "a list for an object": replaced(rb': \{"[^{}]*\}', b": [1]"),
    "not UTF-8": replaced(rb': "', b': "\xff\xfe'),
    "only a list": lambda file: file.write_bytes(b"[1, 2]"),
    "only null": lambda file: file.write_bytes(b"null"),
    "nested": lambda file: file.write_bytes(b"[" * 100_000),
    "nested in an object": lambda file: file.write_bytes(b'{"config": ' + b'{"a": ' * 900 + b"1" + b"}" * 901),
    "zeros": lambda file: file.write_bytes(bytes(4096)),
    "a folder": as_folder,
    "unreadable": as_circle,
}


def fill_run(run: Path) -> None:
    """Write the files that several kinds of run leave in their folders."""
    (run / "checkpoints" / "step_2").mkdir(parents=True)
    write_run_config(run, SFTConfig(), {"command": ["sft"], "versions": {"torch": "2"}, "rows": {"training": {"n": 3}}})
    metrics = JSONLines(run / "metrics.jsonl", resume_step=None)
    for step in (1, 2):
        metrics.log_scalars(step, {"train/loss": 0.5, "val/accuracy": 0.25, "val/brightness": 0.5})
    metrics.close()
    for step in (1, 2):
        clips = [
            {"id": f"{i}", "prompt": "red", "rewards": {"": 0.5, "colour": 1.0}, "brightness": 0.5, "motion": 0.1}
            for i in range(3)
        ]
        write_rows(run / "validation" / f"step_{step}.jsonl", clips)
    (run / RECORD).write_text(json.dumps({"s3://bucket/mine": {"export/final": 17, "checkpoints/step_2": 18}}))
    (run / "wandb").mkdir()
    (run / "wandb" / "run_id").write_text("0123abcd")
    lines = [{"part": "training", "row": 3, "id": "7", "fingerprint": "f", "chosen": -10.5, "rejected": -9.5}]
    (run / "reference.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"model": "m"}, *lines]))


def fill_results(folder: Path) -> None:
    for answer in ("A", "B"):
        write_results(folder / "m" / "letter", "robovqa", f"v{answer}", [made(f"v{answer}", answer=answer)])
    record = {"settings": {"model": "m", "limit": 3}, "config": {"evaluation": {"limit": 3}}}
    (folder / "m" / "letter" / "run.json").write_text(json.dumps(record))


def fill_clips(folder: Path) -> None:
    open_results(folder, {"model": {"path": "old"}, "world": {"sampling_steps": 3}}, overwrite=False)
    for number in range(2):
        write_clip(folder, ClipResult(number, "id", "red", {"": 0.5, "colour": 1.0}, 0.25, 0.5, [1, 2, 3]))


def resume_metrics(run: Path) -> None:
    JSONLines(run / "metrics.jsonl", resume_step=2).close()
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["step"] in (1, 2)


def upload_again(run: Path) -> None:
    uploader = Uploader(parse_target("s3://bucket/mine"), what="all", include=("export",))
    (run / "export" / "final").mkdir(parents=True, exist_ok=True)
    assert not uploader._is_uploaded(run / "export" / "final")
    uploader._record(run / "export" / "final", 19)


def card(run: Path) -> None:
    assert "step" in build_model_card(run, 2, dtype="bf16").lower()


def page(run: Path) -> None:
    html = (write_run_page(run) or run).read_text()
    assert "nan" not in html.lower().replace("finance", "")
    write_run_page(run)  # as after the next validation, which does not warn again


LEFT_OUT: dict[str, tuple[str, Callable[[Path], object]]] = {
    "resume, metrics": ("metrics.jsonl", resume_metrics),
    "model card, metrics": ("metrics.jsonl", card),
    "page, metrics": ("metrics.jsonl", page),
    "page, validation": ("validation/step_1.jsonl", page),
    "validation again": ("validation/step_1.jsonl", lambda run: write_rows(run / "validation" / "step_1.jsonl", [{}])),
    "model card, record": ("config.json", card),
    "page, record": ("config.json", page),
    "resume, digests": ("config.json", lambda run: compare_rows(run / "checkpoints" / "step_2", {})),
    "vision of a run": ("config.json", read_run_vision),
    "record of uploads": (RECORD, upload_again),
    "run of W&B": ("wandb/run_id", lambda run: read_run_id(run / "wandb" / "run_id")),
}
WARNS = (
    "resume, metrics",
    "model card, metrics",
    "page, metrics",
    "page, validation",
    "model card, record",
    "run of W&B",
)
"""Readers of files that cannot be recreated; the other readers' files are dispensable."""


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", LEFT_OUT)
def test_damaged_report_is_left_out(reader: str, damage: str, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = here / "run"
    fill_run(run)
    name, read = LEFT_OUT[reader]
    DAMAGES[damage](run / name)
    read(run)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(str(run / name) in warning for warning in warnings)
    assert len(warnings) <= 1, warnings
    if reader in WARNS and damage in ("cut", "zeros", "a folder", "unreadable"):
        assert len(warnings) == 1


def read_pairs(run: Path) -> None:
    stored = open_stored(run, run / "checkpoints" / "step_2", "m")
    assert all(math.isfinite(row.chosen + row.rejected) for row in stored.rows.values())


def find_world(run: Path) -> None:
    assert eval_command.find_world(None, str(run / "export" / "final")) is None


def report(folder: Path) -> None:
    write_reports(folder, with_html=False)


def compare_clips(folder: Path) -> None:
    for number in write_report(folder, folder).summary.values.values():
        assert math.isfinite(number.mean)


REFUSED: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "resume, configuration": ("config.json", fill_run, read_run_config),
    "evaluation, configuration": ("config.json", fill_run, find_world),
    "reference of pairs": ("reference.jsonl", fill_run, read_pairs),
    "report, answers": ("m/letter/robovqa/vA.json", fill_results, report),
    "report, settings": ("m/letter/run.json", fill_results, report),
    "report, clips": ("clips/1.json", fill_clips, compare_clips),
    "report, settings of clips": ("world.json", fill_clips, compare_clips),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", REFUSED)
def test_damaged_essential_file_is_used_or_named(reader: str, damage: str, here: Path) -> None:
    name, fill, read = REFUSED[reader]
    fill(here / "run")
    (here / "run" / "export" / "final").mkdir(parents=True, exist_ok=True)
    DAMAGES[damage](here / "run" / name)
    try:
        read(here / "run")
    except DsReasonError as error:
        assert error.exit_code == 2
        assert name in str(error)


def test_undamaged_files_are_read_without_warning(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = here / "run"
    fill_run(run)
    record = find_run_record(run)
    assert record is not None and record["config"] == read_run_config(run)
    for reader, (_, read) in LEFT_OUT.items():
        if reader != "validation again":
            read(run)
    fill_results(here / "results")
    fill_clips(here / "clips")
    report(here / "results")
    compare_clips(here / "clips")
    read_pairs(run)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
