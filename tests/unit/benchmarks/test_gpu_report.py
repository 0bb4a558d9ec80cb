"""The report's runner and writer: hanging parts are killed, crashes reported, and earlier results kept."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.gpu_report import __main__ as command
from benchmarks.gpu_report import materials, runner
from benchmarks.gpu_report.parts import PARTS, BenchmarkSetup, Goal, Part, SkipPart
from benchmarks.gpu_report.report import build_record, hide_machine, read_records, write_report
from benchmarks.gpu_report.runner import Ended, run_part

BROKEN = "tests.unit.benchmarks.broken_parts"
ROOT = Path(__file__).parents[3]
CARD = BenchmarkSetup(Path(), cards=1, tiny=False)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchmarkSetup:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return BenchmarkSetup(tmp_path, cards=0, tiny=True)


def part(name: str, seconds: int = 60, goals: tuple[Goal, ...] = ()) -> Part:
    return Part(name, BROKEN, seconds, "a part for tests", goals)


def test_successful_part_is_measured(setup: BenchmarkSetup, tmp_path: Path) -> None:
    ended = run_part(part("works"), setup, tmp_path)
    assert (ended.how, ended.measured) == ("done", {"speed": 2.0, "name": "card"})


def test_hanging_part_is_killed_and_keeps_measurements(
    setup: BenchmarkSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "get_limit", lambda part, setup: 5)
    ended = run_part(part("hangs"), setup, tmp_path)
    assert (ended.how, ended.measured["speed"]) == ("timed out", 1.0)
    assert 5 <= ended.seconds < 15
    child = int(ended.measured["child"])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("name", "how", "measured", "reason"),
    [
        ("crashes", "failed", {"speed": 1.0}, "exit code 1"),
        ("dies", "failed", {"speed": "inf"}, "killed by SIGKILL"),
        ("skips", "skipped", {"speed": 1.0}, "needs a card of 70 GiB, and this one has 24"),
        ("is_missing", "failed", {}, "exit code 1"),
    ],
)
def test_failed_part_records_outcome_and_reason(
    name: str, how: str, measured: dict[str, Any], reason: str, setup: BenchmarkSetup, tmp_path: Path
) -> None:
    ended = run_part(part(name), setup, tmp_path)
    assert (ended.how, ended.measured, ended.reason) == (how, measured, reason)
    assert ("RuntimeError: nothing in" in ended.log) == (name == "crashes")


GOALS = (Goal("speed", ">=", 1.5), Goal("* lost", "==", 0), Goal("here too", "<=", 1.0, on_cpu=True))


@pytest.mark.parametrize(
    ("measured", "cards", "verdict", "missed"),
    [
        ({"speed": 2.0, "a lost": 0, "b lost": 0, "here too": 1.0}, 1, "ok", []),
        ({"speed": 1.0, "a lost": 0, "b lost": 2, "here too": 1.0}, 1, "missed", ["speed", "b lost"]),
        ({"speed": "nan", "a lost": 0, "here too": 1.0}, 1, "missed", ["speed"]),
        ({"speed": 2.0, "here too": 1.0}, 1, "missed", ["* lost"]),
        ({"speed": 0.1, "a lost": 9, "here too": 1.0}, 0, "ok", []),
        ({"speed": 0.1, "here too": 1.1}, 0, "missed", ["here too"]),
    ],
)
def test_verdict_compares_each_measurement_with_goal(
    measured: dict[str, Any], cards: int, verdict: str, missed: list[str]
) -> None:
    ended = Ended("done", 1.0, measured)
    record = build_record(part("works", goals=GOALS), ended, replace(CARD, cards=cards))
    assert record["verdict"] == verdict
    assert [row["name"] for row in record["measurements"] if row["ok"] is False] == missed


def test_unfinished_or_goalless_part_is_not_judged() -> None:
    assert build_record(part("works"), Ended("done", 1.0, {"speed": 2.0}), CARD)["verdict"] == "measured"
    late = build_record(part("works", goals=GOALS), Ended("timed out", 60.0, {"speed": 0.1}, "killed"), CARD)
    assert (late["verdict"], late["measurements"][0]["ok"]) == ("timed out", None)


def test_merging_reports_keeps_newer_results(tmp_path: Path) -> None:
    head, sync = (next(part for part in PARTS if part.name == name) for name in ("head", "sync"))
    write_report(tmp_path, {"sync": build_record(sync, Ended("failed", 1.0, {}, "exit code 1"), CARD)})
    records = read_records(tmp_path)
    write_report(tmp_path, records | {"head": build_record(head, Ended("done", 2.0, {"a|b, s": 0.12345}), CARD)})
    records = read_records(tmp_path)
    assert {name: record["verdict"] for name, record in records.items()} == {"head": "measured", "sync": "failed"}
    text = (tmp_path / "gpu-report.md").read_text()
    assert text.index("## head") < text.index("## sync")
    assert "| a\\|b, s | 0.1235 |  |  |" in text
    write_report(tmp_path, records | {"sync": build_record(sync, Ended("done", 1.0, {"GB/s": 5.0}), CARD)})
    assert read_records(tmp_path)["sync"]["verdict"] == "measured"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in /tmp/x/y/model.py, line 3", "in …/y/model.py, line 3"),
        ("no /" + "home/anna, no /" + "home/anna/run.toml", "no …, no …/run.toml"),
        ("tcp://anna:29500 and annabel", "tcp://<host>:29500 and annabel"),
        ("at 5 GB/s of a/b", "at 5 GB/s of a/b"),
        ("token=hf_abcdefghijklmnop", "token=<HF_TOKEN>"),
    ],
)
def test_folders_secrets_and_machine_name_are_hidden(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setattr(socket, "gethostname", lambda: "anna")
    assert hide_machine(text) == shown


def test_paths_are_removed_from_all_record_texts(tmp_path: Path) -> None:
    place = str(tmp_path / "model")
    ended = Ended("failed", 1.0, {"file": f"in {place}"}, f"cannot open {place}", f"Traceback\n{place}: gone")
    record = build_record(part("works"), ended, CARD)
    assert tmp_path.name in str(ended)
    assert str(tmp_path) not in json.dumps(record)
    assert (record["reason"][:13], record["log"][-12:]) == ("cannot open …", "/model: gone")


def test_unknown_part_is_rejected_with_nearest_name(tmp_path: Path) -> None:
    invoke = CliRunner().invoke(command.app, ["--parts", "environment attenton", "--out", str(tmp_path / "out")])
    assert invoke.exit_code == 2
    assert "unknown part 'attenton'; did you mean 'attention'?" in " ".join(invoke.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("sync, environment", ["environment", "sync"]),
        ("ledger", ["ledger_05b", "ledger_2b", "ledger_7b"]),
        ("", [part.name for part in PARTS]),
    ],
)
def test_parts_are_chosen_in_table_order(names: str, chosen: list[str]) -> None:
    assert [part.name for part in command.choose_parts(names)] == chosen


def longest(parts: list[Part]) -> int:
    """Return how many seconds the parts take if each is killed at its limit."""
    return sum(part.seconds + runner.GONE_WITHIN for part in parts)


def test_one_card_parts_fit_time_limits() -> None:
    assert longest([part for part in PARTS if part.cards == 1]) <= 30 * 60
    calls = re.findall(r'PARTS="(.*)"', command.__doc__ or "")
    assert len(calls) == 3
    assert all(longest(command.choose_parts(parts)) <= 600 for parts in calls)
    names = {part.name for parts in calls for part in command.choose_parts(parts)}
    assert names == {part.name for part in PARTS if part.cards == 1}


@pytest.mark.parametrize(("gib", "size"), [(79.0, "2B"), (24.0, "0.5B"), (15.7, None)])
def test_model_is_chosen_to_fit_gpu_memory(gib: float, size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materials, "get_card_gib", lambda: gib)
    if size is not None:
        assert materials.find_largest_size(CARD) == size
        return
    with pytest.raises(SkipPart, match="0.5B parameters need a card with 20 GiB, but this one has 16"):
        materials.find_largest_size(CARD)


def test_remaining_parts_run_after_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def run(part: Part, setup: BenchmarkSetup, logs: Path, tick: Any, limit: float) -> Ended:
        recorded.append(list(read_records(tmp_path)))
        return Ended("failed", 1.0, {}, "exit code 1") if part.name == "head" else Ended("done", 1.0, {"speed": 1.0})

    monkeypatch.setattr(command, "run_part", run)
    invoke = CliRunner().invoke(command.app, ["--parts", "head sync leaks", "--out", str(tmp_path)])
    assert invoke.exit_code == 1
    assert recorded == [[], ["head"], ["head", "sync"]]


def test_parallel_checks_come_first_when_time_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def run(part: Part, setup: BenchmarkSetup, logs: Path, tick: Any, limit: float) -> Ended:
        calls.append((part.name, limit))
        clock[0] += 0.0 if part.beside else limit
        return Ended("done", limit, {"speed": 1.0})

    monkeypatch.setattr(command, "run_part", run)
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(command, "get_limit", lambda part, setup: part.seconds)
    names = "zero attention parity_bf16 sft grpo ledger_2b"
    result = CliRunner().invoke(command.app, ["--seconds", "200", "--parts", names, "--out", str(tmp_path)])
    # Three checks that run in parallel get at most 60 of the 200 s, then SFT gets 60, and GRPO the remaining time.
    assert sorted(calls[:3]) == [("attention", 40), ("parity_bf16", 60.0), ("zero", 60.0)]
    assert calls[3:] == [("sft", 60), ("grpo", 140.0)]
    records = read_records(tmp_path)
    assert records["sft_zero2"]["verdict"] == records["ledger_2b"]["verdict"] == "skipped"
    assert "the 200 s are used up" in result.output


def test_parallel_checks_keep_measurements_when_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, both_run = threading.Event(), threading.Barrier(2)

    def run(part: Part, setup: BenchmarkSetup, logs: Path, tick: Any, limit: float) -> Ended:
        both_run.wait(timeout=10)
        stopped.set()
        return Ended("timed out", 1.0, {"speed": 1.0})

    monkeypatch.setattr(command, "run_part", run)
    monkeypatch.setattr(command, "catch_stop_signals", lambda: stopped)
    arguments = ["--seconds", "200", "--parts", "zero attention sft", "--out", str(tmp_path)]
    result = CliRunner().invoke(command.app, arguments)
    assert result.exit_code == 130
    records = read_records(tmp_path)
    assert {name: len(record["measurements"]) for name, record in records.items()} == {"zero": 1, "attention": 1}


def test_stopped_report_ends_parts_and_keeps_measurements(tmp_path: Path) -> None:
    arguments = ["--parts", "environment vision", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu_report", *arguments],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None and not (tmp_path / "logs" / "vision.log").exists():
        time.sleep(0.05)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert not child.is_running()
    parts = json.loads((tmp_path / "gpu-report.json").read_text())["parts"]
    assert {name: record["verdict"] for name, record in parts.items()} == {
        "environment": "measured",
        "vision": "timed out",
    }


@pytest.mark.parametrize(
    ("given", "commands"),
    [
        (["PYTHON=python3", "PARTS=head sync"], ['python3 -m benchmarks.gpu_report --parts "head sync"']),
        (["PYTHON=python3", "OUT=folder"], ['python3 -m benchmarks.gpu_report --parts "" --out "folder"']),
    ],
)
def test_make_with_given_interpreter_installs_nothing(given: list[str], commands: list[str]) -> None:
    remaining = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OUT", "PARTS", "PYTHON", "MAKEFLAGS", "MAKELEVEL")
    }
    completed = subprocess.run(
        ["make", "-n", "gpu-report", *given], cwd=ROOT, env=remaining, capture_output=True, text=True
    )
    assert [line.strip() for line in completed.stdout.splitlines()] == commands
