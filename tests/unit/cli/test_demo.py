"""`dsreason demo --world`: its recipes lead into each other, and its table says what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsreason.cli import demo
from dsreason.cli.job import Job
from dsreason.config.load import load_config
from dsreason.config.schema_world import WorldConfig


def recipe(name: str) -> WorldConfig:
    return load_config(WorldConfig, demo.WORLD_RECIPES[name], default_recipe="builtin_world.toml")


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_both_repairs_begin_alike_and_have_the_same_prompts_size_and_reward(name: str) -> None:
    first, repair = recipe("sft"), recipe(name)
    assert repair.model.path == "outputs/squares/export/final"  # what the first one's comment writes
    assert repair.world.algorithm == name
    assert first.data.model_copy(update={"path": ""}) == repair.data
    assert {key for key, weight in repair.reward.functions.items() if weight} == {"follow"}
    assert first.reward == repair.reward
    for key in ("sampling_steps", "schedule", "shift", "guidance_scale"):
        assert getattr(first.world, key) == getattr(repair.world, key)
    assert first.validation.max_samples == repair.validation.max_samples == first.data.validation


def test_each_stage_of_the_demo_has_a_recipe() -> None:
    assert len(demo.WORLD_STAGES) == len(demo.WORLD_RECIPES)
    assert recipe("sft").data.path == "mislabelled"


def test_the_table_has_the_last_validation_of_each_run(tmp_path: Path) -> None:
    names = ["val/reward/mean", "val/reward/colour/mean", "val/reward/solid/mean", "val/brightness"]
    for number, name in enumerate(demo.WORLD_RECIPES, 1):
        (tmp_path / name).mkdir()
        lines = [{"step": step, **dict.fromkeys(names, step * number / 10)} for step in (0, 3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console = Console(record=True, width=100)
    console.print(demo.world_table(tmp_path))
    shown = " ".join(console.export_text().split())
    assert "reward (colour · solid) │ 0.300 │ 0.600 │ 0.900" in shown


@pytest.mark.parametrize("line", [{"val/brightness": 0.5}, {"val/reward/mean": 0.3, "val/reward/red/mean": 0.3}, {}])
def test_the_end_leaves_out_what_changed_settings_did_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: dict[str, float]
) -> None:
    def run_job(job: Job, **settings: Any) -> None:
        assert job.output_dir is not None
        job.output_dir.mkdir()
        (job.output_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, **line}) + "\n")
        if line and job.output_dir.name != "nft":
            (job.output_dir / "world.html").touch()

    monkeypatch.setattr(demo, "run_job", run_job)
    demo.world_demo(tmp_path, None, ())
    shown = " ".join(capsys.readouterr().out.split())
    assert "colour as asked │ - │ - │ -" in shown
    assert ("rewards of sft" in shown) == bool(line)
    assert "rewards of nft" not in shown
