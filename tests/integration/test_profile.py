"""`monitor.profile` in an SFT run on two ranks: it writes its files, and changes nothing else."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]

SETTINGS = (
    *("train.max_steps=3", "train.global_batch_size=4", "train.micro_batch_size=1", "data.workers=1"),
    *("validation.before_training=false", "validation.max_samples=2", "validation.generate=false"),
    *("checkpoint.last=false", "checkpoint.keep_best=false", "checkpoint.best_metric=val/loss", "checkpoint.every=0"),
    "checkpoint.export=none",
)
MEASURED = ("time/", "perf/", "memory/")
"""Metrics that vary from run to run."""


def train(folder: Path, *settings: str) -> Path:
    options = [f"--set={setting}" for setting in (*SETTINGS, *settings)]
    ended = dsreason("sft", "--nproc", 2, "--output-dir", folder, *options, cwd=folder.parent)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("profiled") / "run", "monitor.profile=[2]")


def test_trace_contains_one_step_with_phases(profiled: Path) -> None:
    assert {path.name for path in (profiled / "profile").iterdir()} == {"step_2.json.gz", "step_2.txt"}
    with gzip.open(profiled / "profile" / "step_2.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    phases = {name: names[f"phase: {name}"] for name in ("step 2", "train", "forward", "backward", "optimizer")}
    # This rank computes two of the four samples, one in each micro-batch.
    assert phases == {"step 2": 1, "train": 1, "forward": 2, "backward": 2, "optimizer": 1}
    assert names["phase: data"] == 1
    assert any(event["name"] == "aten::mm" for event in events)


def test_profile_table_has_row_per_phase(profiled: Path) -> None:
    lines = (profiled / "profile" / "step_2.txt").read_text().splitlines()
    assert lines[0].startswith("step 2: ")
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert {"data", "forward", "backward", "optimizer", "outside all phases"} <= set(rows)


@pytest.mark.long
def test_profiling_does_not_change_metrics(profiled: Path, tmp_path: Path) -> None:
    plain = train(tmp_path / "run")
    assert not (plain / "profile").exists()
    values, expected = (
        [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in metrics(folder)]
        for folder in (profiled, plain)
    )
    assert len(values) == 3
    assert values == expected


def test_profile_beyond_last_step_is_rejected(tmp_path: Path) -> None:
    options = [f"--set={setting}" for setting in (*SETTINGS, "monitor.profile=[2, 4]")]
    ended = dsreason("sft", "--dry-run", *options, cwd=tmp_path)
    assert ended.returncode == 2
    assert "monitor.profile: step 4 does not exist, because the run ends with step 3" in ended.stderr
