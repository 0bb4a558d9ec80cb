"""The DPO training loop: pairs of answers → log-probabilities of both → preference loss → optimizer step."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine

from dsreason.config.schema_dpo import DPOConfig, PreferenceConfig
from dsreason.engine.engine import take_optimizer_step
from dsreason.job.ranks import World
from dsreason.train.common.global_batches import show_batches, train_on_loader
from dsreason.train.dpo.build import DPOTrainer, build_dpo
from dsreason.train.dpo.loader import StepPairs
from dsreason.train.dpo.reference import PairReference
from dsreason.train.dpo.update import Baseline, accumulate_gradients, build_settings, compute_pair_metrics

log = logging.getLogger(__name__)

SHOWN = {"loss": "train/loss", "accuracy": "dpo/accuracy"}
"""Metrics displayed in the progress bar: label → metric key."""


def run(config: DPOConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Run DPO training; every rank of a job calls this. Return once the last checkpoint and the export are on disk."""
    with build_dpo(config, output_dir, resume) as dpo:
        train_on_loader(dpo.run, dpo.loader, partial(train_on_batches, dpo), dpo.validate)


def train_on_batches(dpo: DPOTrainer, batches: StepPairs) -> None:
    """Run one optimizer step on a global batch, increment the step count and log the metrics."""
    run, engine, baseline, started = dpo.run, dpo.engine, dpo.baseline, time.perf_counter()
    with run.memory.track_phase("train"):
        config, world = dpo.job.config.dpo, dpo.job.world
        metrics = run_dpo_step(
            engine, batches, dpo.reference, baseline, lr=run.learning_rate, config=config, world=world
        )
        metrics = run.finite.metrics(metrics, batches.micro_batches, engine.global_steps)
    if not batches.num_tokens:
        metrics.pop("train/loss")  # without pairs, there is no mean loss
    seconds = time.perf_counter() - started
    saved_baseline = {"baseline": [baseline.total, baseline.count]} if baseline.count else {}
    run.count_step(
        epoch=engine.global_steps / dpo.steps_per_epoch, extra=saved_baseline, learned=batches.num_tokens > 0
    )
    if "dpo/chosen" in metrics and (warning := dpo.watch.record(metrics["dpo/chosen"], metrics["dpo/accuracy"])):
        log.warning("%s", warning)
    progress_values = {name: metrics[key] for name, key in SHOWN.items() if key in metrics}
    show_batches(run, dpo.utilisation, batches, metrics, progress_values, seconds=seconds)


def run_dpo_step(
    engine: DeepSpeedEngine,
    batches: StepPairs,
    reference: PairReference,
    baseline: Baseline,
    *,
    lr: float,
    config: PreferenceConfig,
    world: World,
) -> dict[str, float]:
    """Run one optimizer step on a global batch. The result does not depend on how the batch is divided."""
    settings = build_settings(config, baseline)
    pairs, router_metrics = accumulate_gradients(engine, batches, reference, config, world, baseline)
    metrics = {"train/loss": 0.0} | router_metrics | take_optimizer_step(engine, lr)
    if len(pairs.chosen) == 0:  # all rows of the step were skipped
        return metrics
    pair_metrics = compute_pair_metrics(pairs, config, settings)
    metrics["train/loss"] = pair_metrics.pop("total")
    if "bco" in config.weights:
        metrics["dpo/baseline"] = settings.baseline
        baseline.add(pairs, config.beta)
    return metrics | {f"dpo/{name}": value for name, value in pair_metrics.items()}
