"""Validation on held-out preference pairs: the loss, margins, accuracies and, if enabled, generated answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine

from dsreason.config.schema_dpo import DPOConfig
from dsreason.engine.zero3 import release_gathered
from dsreason.errors import DataError
from dsreason.job.ranks import World, gather_objects
from dsreason.losses.preference import Pairs, build_pairs
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.progress import Progress
from dsreason.train.common.answers import ValidationResult
from dsreason.train.common.validate import HeldOut
from dsreason.train.dpo.loader import iter_pair_batches
from dsreason.train.dpo.reference import PairReference
from dsreason.train.dpo.update import (
    Baseline,
    build_settings,
    compute_pair_metrics,
    compute_reference_logprobs,
    gather_pairs,
)

log = logging.getLogger(__name__)

NAMES = {"total": "loss", "accuracy": "preference_accuracy", "ranking": "ranking_accuracy"}
"""Pair metrics with a different name in validation: name in training → name in validation."""


@dataclass(frozen=True)
class PreferenceResult:
    """The result of a validation, identical on all ranks."""

    metrics: dict[str, float]
    answered: ValidationResult | None

    def summary(self, step: int) -> str:
        """Format the result as a log line.

        Example: `validation at step 60: loss 0.1234, margin 2.31, preferences 93.8 %, accuracy 90.6 %`.
        """
        metrics = self.metrics
        line = f"validation at step {step}: loss {metrics['val/loss']:.4f}, margin {metrics['val/margin']:.2f}, preferences "
        line += f"{metrics['val/preference_accuracy']:.1%}"
        if "val/accuracy" in metrics:
            line += f", accuracy {metrics['val/accuracy']:.1%}"
        return line.replace("%", " %")

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        if self.answered is not None:
            self.answered.write(output_dir, step, metrics, world)


def validate_preferences(
    engine: DeepSpeedEngine,
    reference: PairReference,
    held_out: HeldOut[DPOConfig],
    baseline: Baseline,
    progress: Progress,
) -> dict[str, float]:
    """Compute the policy's loss (`val/loss`), margins and accuracies on the held-out pairs. Collective."""
    config = held_out.config
    pairs = measure_pairs(engine, reference, held_out, progress)
    metrics = compute_pair_metrics(pairs, config.dpo, build_settings(config.dpo, baseline))
    return {f"val/{NAMES.get(name, name)}": value for name, value in metrics.items() if name != "loss"}


@torch.no_grad()
def measure_pairs(
    engine: DeepSpeedEngine, reference: PairReference, held_out: HeldOut[DPOConfig], progress: Progress
) -> Pairs:
    """Compute the log-probabilities of the held-out pairs, and gather the pairs from all ranks. Collective.

    Raises:
        DataError: none of the rows is usable.
    """
    config, world, rows, pairs = held_out.config, held_out.world, held_out.rows, []
    was_training = engine.training
    engine.eval()
    size = config.validation.micro_batch_size * world.size
    with progress.track_phase("validation: preferences", len(rows), "pairs") as advance:
        for batches in iter_pair_batches(held_out.dataset, held_out.encoder, rows, config, world, batch_size=size):
            for message in batches.skipped:
                log.warning("validation: skipped a row: %s", message)
            refs = compute_reference_logprobs(engine, reference, batches.parts, "validation")
            for micro_batch, ref in zip(batches.parts, refs, strict=True):
                logprobs = engine(micro_batch.batch.to(engine.device))
                pairs.append(build_pairs(logprobs, micro_batch.lengths.to(engine.device), ref))
            advance(batches.num_samples + len(batches.skipped))
    engine.train(was_training)
    release_gathered(engine)
    if not any(gather_objects(any(len(part.chosen) for part in pairs))):
        raise DataError(f"validation: none of the {len(rows)} held-out rows can be used; see the log for the reasons")
    return gather_pairs(pairs, world)
