"""Setup of a DPO run: pairs, model, reference log-probabilities, metrics and progress display."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.order import StepOrder, pick_evenly
from dsreason.engine.reference import BaseReference
from dsreason.engine.zero3 import release_gathered
from dsreason.job.ranks import run_on_rank_zero
from dsreason.models.folder import compute_fingerprint
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.train.common.global_batches import build_step_order
from dsreason.train.common.job import TrainingJob
from dsreason.train.common.opening import (
    TrainingRows,
    build_policy_engine,
    open_policy_job,
    start_policy,
    start_policy_run,
)
from dsreason.train.common.run import TrainingRun
from dsreason.train.common.sampler import Sampler
from dsreason.train.common.utilisation import UtilisationMeter, build_utilisation_meter
from dsreason.train.common.validate import HeldOut, answer_rows
from dsreason.train.dpo.loader import PairLoader, StepPairs, build_pair_loader, iter_pair_batches
from dsreason.train.dpo.preflight import check
from dsreason.train.dpo.reference import (
    AdapterOff,
    NoReference,
    PairReference,
    RowReference,
    StoredReference,
    open_stored,
    read_reference_file,
)
from dsreason.train.dpo.update import Baseline, ChosenWatch
from dsreason.train.dpo.validate import PreferenceResult, validate_preferences

log = logging.getLogger(__name__)

LOG_EVERY_S = 30.0


@dataclass(kw_only=True)
class DPOTrainer:
    """The components of a DPO run."""

    job: TrainingJob[DPOConfig]
    run: TrainingRun[DPOConfig]
    engine: DeepSpeedEngine
    sampler: Sampler
    """Sampler that generates answers to the held-out prompts."""
    held_out: HeldOut[DPOConfig]
    loader: PairLoader
    reference: PairReference
    baseline: Baseline
    utilisation: UtilisationMeter
    steps_per_epoch: float
    watch: ChosenWatch = field(default_factory=ChosenWatch)

    def validate(self, step: int) -> PreferenceResult | None:
        """Measure the policy on the held-out rows; return None if the run has no held-out rows. Collective."""
        if len(self.held_out.dataset) == 0:
            return None
        metrics = validate_preferences(self.engine, self.reference, self.held_out, self.baseline, self.run.progress)
        if not self.job.config.validation.generate:
            return PreferenceResult(metrics, None)
        answers = answer_rows(self.sampler, self.held_out, version=step, progress=self.run.progress)
        return PreferenceResult(metrics | answers.metrics, answers)


@contextmanager
def build_dpo(config: DPOConfig, output_dir: Path | None, resume: str | None) -> Iterator[DPOTrainer]:
    """Join the job, check the config and build the trainer; release its resources on exit. Collective."""
    with ExitStack() as stack:
        job, rows = open_policy_job(config, output_dir, resume, command="dpo", check=check, stack=stack)
        config, world = job.config, job.world
        order = build_step_order(rows.training, config)
        with job.watchdog.track_phase("load_model"):
            engine = build_policy_engine(config, job.deepspeed, job.model_path, world.group)
        # The reference must be opened before a checkpoint is loaded, which replaces the initial weights.
        reference = open_reference(job, rows, engine, order)
        with job.watchdog.track_phase("load_model"):
            state = start_policy(job, engine)
        settings = TransformersSettings(attention=config.model.attention, batch_size=config.validation.micro_batch_size)
        run, sampler = start_policy_run(
            job, rows, stack, engine=engine, settings=settings, state=state, total_steps=order.num_steps
        )
        yield DPOTrainer(
            job=job,
            run=run,
            engine=engine,
            sampler=sampler,
            held_out=HeldOut(rows.validation, rows.encoder, config, world),
            loader=build_pair_loader(rows.training, rows.encoder, order, config, world, start_step=state.step),
            reference=reference,
            baseline=Baseline(*state.extra.get("baseline", ())),
            utilisation=build_utilisation_meter(engine, world),
            steps_per_epoch=order.rows_per_epoch / config.train.global_batch_size,
        )


def open_reference(
    job: TrainingJob[DPOConfig], rows: TrainingRows, engine: DeepSpeedEngine, order: StepOrder
) -> PairReference:
    """Open the reference for the log-ratios while `engine` still holds the initial weights. Collective."""
    config = job.config
    if config.dpo.reference == "none":
        return NoReference()
    if config.dpo.reference == "adapter_off":
        return AdapterOff(BaseReference(engine))
    if config.dpo.reference == "precomputed" and config.dpo.reference_file is None:
        return RowReference()
    model = run_on_rank_zero(lambda: compute_fingerprint(job.model_path))
    if config.dpo.reference_file is not None:
        file_reference = run_on_rank_zero(partial(read_reference_file, config.dpo.reference_file))
        if job.world.rank == 0:
            file_reference.warn_if_model_differs(model)
        return file_reference
    stored = run_on_rank_zero(lambda: open_stored(job.output_dir, job.checkpoint, model))
    training_rows = {row for step in range(order.num_steps) for row in order.indices(step)}
    validation_rows = pick_evenly(len(rows.validation), config.validation.max_samples)
    engine.eval()
    for part, dataset, indices in (
        ("training", rows.training, training_rows),
        ("validation", rows.validation, validation_rows),
    ):
        missing = stored.list_missing(part, indices)
        batches = iter_pair_batches(
            dataset, rows.encoder, missing, config, job.world, batch_size=config.train.global_batch_size
        )
        measure_missing(engine, stored, part, batches, len(missing), job)
    engine.train()
    release_gathered(engine)
    return stored


def measure_missing(
    engine: DeepSpeedEngine,
    stored: StoredReference,
    part: str,
    batches: Iterator[StepPairs],
    num_rows: int,
    job: TrainingJob[DPOConfig],
) -> None:
    """Compute the reference log-probabilities for the rows in `batches` with the engine's weights, and add them to
    `stored`. Collective."""
    num_done, logged = 0, time.monotonic()
    while num_done < num_rows:
        with job.watchdog.track_phase("data"):
            batch = next(batches)
        with job.watchdog.track_phase("prepare"):
            stored.measure(engine, part, batch, job.world)
        num_done += batch.num_samples + len(batch.skipped)
        if time.monotonic() - logged > LOG_EVERY_S:
            log.info("reference: %d of %d %s rows measured", num_done, num_rows, part)
            logged = time.monotonic()
    if num_rows:
        log.info("reference: %d %s rows measured and saved to %s", num_rows, part, stored.file)
