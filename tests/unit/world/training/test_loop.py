"""What is shown of a step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsreason.job.ranks import World
from dsreason.train.common.nonfinite import FiniteCheck
from dsreason.world.schema import WorldConfig
from dsreason.world.training import loop
from dsreason.world.training.clips import Share


@pytest.mark.parametrize(
    ("algorithm", "rollout", "loss", "expected"),
    [
        ("sft", {}, 0.5, {"loss": 0.5}),
        ("sft", {}, math.nan, {}),
        ("nft", {"reward/mean": 0.25}, 0.5, {"reward": 0.25}),
        ("nft", {"reward/mean": 0.25}, math.nan, {"reward": 0.25}),
    ],
)
def test_a_skipped_step_is_shown_without_its_loss(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    rollout: dict[str, float],
    loss: float,
    expected: dict[str, float],
) -> None:
    told: list[dict[str, float]] = []
    monkeypatch.setattr(loop, "count_step", lambda *given, **named: None)
    monkeypatch.setattr(loop, "show_step", lambda run, metrics, shown, **named: told.extend([metrics, shown]))
    monkeypatch.setattr(loop, "gather_objects", lambda value: [value])
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(global_steps=3),
        config=WorldConfig.model_validate({"world": {"algorithm": algorithm}}),
        order=SimpleNamespace(rows_per_epoch=8),
        lora=None,
        share=Share(0, 1),
        shape=(16, 3, 4, 4),
        rollout_metrics=rollout,
    )
    finite = FiniteCheck("skip", tmp_path, World(0, 0, 1, torch.device("cpu")))
    metrics = {"train/loss": loss, "train/grad_norm": loss, "train/learning_rate": 1e-5}
    found = finite.metrics(metrics, [], 3) | {"time/rollout": 1.0, "time/train": 1.0}
    loop.finish_step(run, [], found)
    metrics, shown = told
    assert shown == expected
    assert ("train/loss" in metrics) is math.isfinite(loss)
