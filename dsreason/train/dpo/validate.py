"""Held-out preferences: loss, margins and accuracy; and generated answers where they are asked for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from dsreason.engine.zero3 import release_gathered
from dsreason.errors import DataError
from dsreason.job.ranks import World, gather_objects
from dsreason.losses.preference import Pairs, pairs_of
from dsreason.monitor.metrics import Metrics
from dsreason.train.common.answers import ValidationResult
from dsreason.train.common.validate import HeldOut, answer_rows
from dsreason.train.dpo.build import DPORun, pair_batches
from dsreason.train.dpo.update import gather_pairs, metrics_of, reference_logprobs, settings_of

log = logging.getLogger(__name__)

NAMES = {"total": "loss", "accuracy": "preference_accuracy", "ranking": "ranking_accuracy"}
"""What the metrics of pairs are called in validation, where it is another name."""


@dataclass(frozen=True)
class PreferenceResult:
    """Equal on all ranks."""

    metrics: dict[str, float]
    answered: ValidationResult | None

    def summary(self, step: int) -> str:
        """`validation at step 60: loss 0.1234, margin 2.31, preferences 93.8 %, accuracy 90.6 %`."""
        found = self.metrics
        text = (
            f"validation at step {step}: loss {found['val/loss']:.4f}, margin {found['val/margin']:.2f}, preferences "
        )
        text += f"{found['val/preference_accuracy']:.1%}"
        if "val/accuracy" in found:
            text += f", accuracy {found['val/accuracy']:.1%}"
        return text.replace("%", " %")

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        if self.answered is not None:
            self.answered.write(output_dir, step, metrics, world)


def validate(dpo: DPORun) -> PreferenceResult | None:
    """Measure the policy on held-out rows; None where there are none. Collective."""
    if len(dpo.validation) == 0:
        return None
    held_out = HeldOut(dpo.validation, dpo.encoder, dpo.config, dpo.world)
    settings = settings_of(dpo.config.dpo, dpo.baseline)
    found = metrics_of(held_out_pairs(dpo, held_out.rows), dpo.config.dpo, settings)
    metrics = {f"val/{NAMES.get(name, name)}": value for name, value in found.items() if name != "loss"}
    if not dpo.config.validation.generate:
        return PreferenceResult(metrics, None)
    answered = answer_rows(dpo.sampler, held_out, version=dpo.state.step, progress=dpo.progress)
    return PreferenceResult(metrics | answered.metrics, answered)


@torch.no_grad()
def held_out_pairs(dpo: DPORun, rows: list[int]) -> Pairs:
    """Those of all ranks. Raises DataError where none of the rows can be used."""
    engine, found = dpo.engine, []
    was_training = engine.training
    engine.eval()
    size = dpo.config.validation.micro_batch_size * dpo.world.size
    with dpo.progress.phase("validation: preferences", len(rows), "pairs") as advance:
        for batches in pair_batches(dpo, dpo.validation, rows, size):
            for text in batches.skipped:
                log.warning("validation: left out: %s", text)
            refs = reference_logprobs(engine, dpo.reference, batches.parts, "validation")
            for one, ref in zip(batches.parts, refs, strict=True):
                logprobs = engine(one.batch.to(engine.device))
                found.append(pairs_of(logprobs, one.lengths.to(engine.device), ref))
            advance(batches.num_samples + len(batches.skipped))
    engine.train(was_training)
    release_gathered(engine)
    if not any(gather_objects(any(len(pairs.chosen) for pairs in found))):
        raise DataError(f"validation: none of the {len(rows)} held-out rows can be used; see the log for why")
    return gather_pairs(found, dpo.world)
