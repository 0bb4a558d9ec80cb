"""DPO on the built-in task: a model that learned wrong answers learns the correct ones from pairs of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.nightly]


def train(warm_start: Path, folder: Path, *options: str) -> list[dict[str, float]]:
    """Continue training from the warm start, with output in `folder/D`; return the metrics of the run's validations."""
    model = f'model.path="{warm_start / "export" / "final"}"'
    arguments = ("--nproc", 2, "--output-dir", "D", "--set", model, *options)
    ended = dsreason("dpo", *arguments, cwd=folder, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    return [line for line in metrics(folder / "D") if "val/accuracy" in line]


def test_preference_training_raises_accuracy(warm_start: Path, tmp_path: Path) -> None:
    first, *_, last = train(warm_start, tmp_path)
    assert 0.4 <= first["val/accuracy"] <= 0.65
    assert (
        last["val/accuracy"] >= first["val/accuracy"] + 0.2
    )  # the accuracy is that of answers generated for held-out rows
    assert last["val/ranking_accuracy"] >= first["val/ranking_accuracy"] + 0.2
    assert last["val/preference_accuracy"] >= 0.9


def test_zero_sft_weight_causes_one_warning(warm_start: Path, tmp_path: Path) -> None:
    last = train(warm_start, tmp_path, "--set", "dpo.sft_weight=0.0", "--set", "train.max_steps=40")[-1]
    assert last["val/preference_accuracy"] >= 0.9
    assert last["val/chosen"] < 0
    assert (tmp_path / "D/logs/rank_0.log").read_text().count("raise dpo.sft_weight") == 1
