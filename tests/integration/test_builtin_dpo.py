"""DPO on the built-in task: what learned wrong answers learns the right ones from pairs of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_preferences_make_the_answers_right(warm_start: Path, tmp_path: Path) -> None:
    model = f'model.path="{warm_start / "export" / "final"}"'
    ended = dsreason("dpo", "--nproc", 2, "--output-dir", "D", "--set", model, cwd=tmp_path, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    first, *_, last = (line for line in metrics(tmp_path / "D") if "val/accuracy" in line)
    assert 0.4 <= first["val/accuracy"] <= 0.65
    assert last["val/accuracy"] >= first["val/accuracy"] + 0.2  # generated answers of held-out rows
    assert last["val/ranking_accuracy"] >= first["val/ranking_accuracy"] + 0.2
    assert last["val/preference_accuracy"] >= 0.9
