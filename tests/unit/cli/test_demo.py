"""`dsreason demo --world`: each recipe continues from the previous one, and the table shows the change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from dsreason.cli import demo
from dsreason.config.load import load_config
from dsreason.world.schema import WorldConfig


def recipe(name: str) -> WorldConfig:
    return load_config(WorldConfig, demo.WORLD_RECIPES[name], default_recipe="builtin_world.toml")


@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
def test_demo_repairs_share_prompts_size_and_reward(name: str) -> None:
    first, repair = recipe("sft"), recipe(name)
    assert (
        repair.model.path == "outputs/squares/export/final"
    )  # the output of the command in the first recipe's comment
    assert repair.world.algorithm == name
    assert first.data.model_copy(update={"path": ""}) == repair.data
    assert {key for key, weight in repair.reward.functions.items() if weight} == {"follow"}
    assert first.reward == repair.reward
    for key in ("sampling_steps", "schedule", "shift", "guidance_scale"):
        assert getattr(first.world, key) == getattr(repair.world, key)
    assert first.validation.max_samples == repair.validation.max_samples == first.data.validation


def test_each_demo_stage_has_a_recipe() -> None:
    assert len(demo.WORLD_STAGES) == len(demo.WORLD_RECIPES)
    assert recipe("sft").data.path == "mislabelled"


def test_table_shows_last_validation_per_run(tmp_path: Path) -> None:
    names = ["val/reward/mean", "val/reward/colour/mean", "val/reward/solid/mean", "val/brightness"]
    for number, name in enumerate(demo.WORLD_RECIPES, 1):
        (tmp_path / name).mkdir()
        lines = [{"step": step, **dict.fromkeys(names, step * number / 10)} for step in (0, 3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "reward (colour · solid) │ 0.300 │ 0.600 │ 0.900" in shown_table(tmp_path)


def test_table_shows_dash_for_missing_metrics(tmp_path: Path) -> None:
    """Cover other rewards, runs without validation, and non-finite values."""
    for name in demo.WORLD_RECIPES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0, "val/brightness": 0.5, "val/reward/mean": null}\n')
    displayed = shown_table(tmp_path)
    assert "requested colour │ - │ - │ - " in displayed
    assert "reward (colour · solid) │ - │ - │ - " in displayed
    assert "brightness │ 0.500 │ 0.500 │ 0.500" in displayed


def shown_table(folder: Path) -> str:
    console = Console(record=True, width=100)
    console.print(demo.build_world_table(folder))
    return " ".join(console.export_text().split())
