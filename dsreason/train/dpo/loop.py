"""DPO: pairs of answers → log-probabilities of both → preference loss → optimizer step."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from dsreason.config.schema_dpo import DPOConfig
from dsreason.engine.engine import engine_grad_norm, set_learning_rate
from dsreason.phases import record_phase
from dsreason.train.common.global_batches import show_batches, wait_for_batches
from dsreason.train.common.saving import finish, poll_checkpoint
from dsreason.train.common.steps import after_steps, before_steps, count_step, learning_rate
from dsreason.train.dpo.build import DPORun, build_dpo
from dsreason.train.dpo.loader import StepPairs
from dsreason.train.dpo.update import accumulate_gradients, metrics_of, settings_of
from dsreason.train.dpo.validate import validate

log = logging.getLogger(__name__)

SHOWN = {"loss": "train/loss", "accuracy": "dpo/accuracy"}
"""In the progress bar."""


def run(config: DPOConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_dpo(config, output_dir, resume) as dpo:
        train(dpo)


def train(dpo: DPORun) -> None:
    before_steps(dpo, validate)
    for batches in wait_for_batches(dpo.loader, dpo.watchdog):
        poll_checkpoint(dpo)
        started, first = time.perf_counter(), dpo.state.step
        with dpo.watchdog.phase("step"):
            with dpo.memory.phase("train"):
                metrics = dpo_step(dpo, batches)
                metrics = dpo.finite.metrics(metrics, batches.micro_batches, dpo.engine.global_steps)
            finish_step(dpo, batches, metrics, seconds=time.perf_counter() - started)
        after_steps(dpo, first, validate)
    finish(dpo)


def dpo_step(dpo: DPORun, batches: StepPairs) -> dict[str, float]:
    """One optimizer step over one global batch, however it was cut into micro-batches and over ranks."""
    engine, config, lr = dpo.engine, dpo.config.dpo, learning_rate(dpo)
    set_learning_rate(engine, lr)
    settings = settings_of(config, dpo.baseline)
    pairs = accumulate_gradients(engine, batches, dpo.reference, config, dpo.world, dpo.baseline)
    with record_phase("optimizer"):
        engine.step()
    metrics = {"train/loss": 0.0, "train/learning_rate": lr, "train/grad_norm": engine_grad_norm(engine)}
    if len(pairs.chosen) == 0:  # all rows of the step are left out
        return metrics
    found = metrics_of(pairs, config, settings)
    metrics["train/loss"] = found.pop("total")
    if "bco" in config.weights:
        metrics["dpo/baseline"] = settings.baseline
        dpo.baseline.add(pairs, config.beta)
    return metrics | {f"dpo/{name}": value for name, value in found.items()}


def finish_step(dpo: DPORun, batches: StepPairs, metrics: dict[str, float], *, seconds: float) -> None:
    """Count the step and show it."""
    baseline = {"baseline": [dpo.baseline.total, dpo.baseline.count]} if dpo.baseline.count else {}
    count_step(dpo, epoch=dpo.engine.global_steps / dpo.steps_per_epoch, extra=baseline)
    if "dpo/chosen" in metrics and (warning := dpo.watch.look(metrics["dpo/chosen"], metrics["dpo/accuracy"])):
        log.warning("%s", warning)
    shown = {name: metrics[key] for name, key in SHOWN.items() if key in metrics}
    show_batches(dpo, dpo.arithmetic, batches, metrics, shown, seconds=seconds)
