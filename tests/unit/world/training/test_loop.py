"""The display of a training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.progress import Progress
from dsreason.train.common.nonfinite import FiniteCheck
from dsreason.world.schema import WorldConfig
from dsreason.world.training import gradients, loop
from dsreason.world.training.clips import ClipShare
from tests.runs import make_job, make_run


class Curves(Metrics):
    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.values = dict(values)


class Bar(Progress):
    def step(self, step: int, shown: Mapping[str, float], *, samples: int, tokens: int) -> None:
        self.shown = dict(shown)


@pytest.mark.parametrize(
    ("algorithm", "rollout", "loss", "expected"),
    [
        ("sft", {}, 0.5, {"loss": 0.5}),
        ("sft", {}, math.nan, {}),
        ("nft", {"reward/mean": 0.25}, 0.5, {"reward": 0.25}),
        ("nft", {"reward/mean": 0.25}, math.nan, {"reward": 0.25}),
    ],
)
def test_skipped_step_is_displayed_without_loss(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    rollout: dict[str, float],
    loss: float,
    expected: dict[str, float],
) -> None:
    monkeypatch.setattr(gradients, "gather_objects", lambda value: [value])
    config = WorldConfig.model_validate({"world": {"algorithm": algorithm}})
    job = make_job(config, tmp_path)
    run = make_run(job, TrainerState(step=2))
    run.engine, run.metrics, run.progress = SimpleNamespace(global_steps=3), Curves(), Bar()  # type: ignore[assignment]
    trainer: Any = SimpleNamespace(
        run=run,
        clip_maker=SimpleNamespace(config=config, share=ClipShare(0, 1), inputs=SimpleNamespace(shape=(16, 3, 4, 4))),
        order=SimpleNamespace(rows_per_epoch=8),
        lora=None,
    )
    finite = FiniteCheck("skip", tmp_path, job.world)
    metrics = {"train/loss": loss, "train/grad_norm": loss, "train/learning_rate": 1e-5}
    metrics = finite.metrics(metrics, [], 3) | {"time/rollout": 1.0, "time/train": 1.0} | rollout
    loop.finish_step(trainer, [], metrics)
    assert run.state.step == 3
    assert run.progress.shown == expected
    assert ("train/loss" in run.metrics.values) is math.isfinite(loss)
