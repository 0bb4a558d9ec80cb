"""Building a DPO run: pairs, model, the reference's log-probabilities, and what shows the run to a person."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.order import StepOrder, evenly
from dsreason.data.sources import SampleDataset
from dsreason.engine.reference import BaseReference
from dsreason.engine.zero3 import release_gathered
from dsreason.job.ranks import gather_objects, on_rank_zero
from dsreason.models.folder import model_fingerprint
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.train.common.arithmetic import Arithmetic, arithmetic_of
from dsreason.train.common.global_batches import step_order
from dsreason.train.common.opening import OpenedRun, Run, build_policy_engine, open_run, start_policy, start_run
from dsreason.train.dpo.loader import Chunks, PairLoader, StepPairs
from dsreason.train.dpo.preflight import check, pair_encoder
from dsreason.train.dpo.reference import (
    AdapterOff,
    NoReference,
    Reference,
    RowReference,
    StoredReference,
    open_stored,
    read_given,
)
from dsreason.train.dpo.update import Baseline, ChosenWatch

log = logging.getLogger(__name__)

TELL_EVERY_S = 30.0


@dataclass(kw_only=True)
class DPORun(Run[DPOConfig]):
    """What DPO has beside the parts of every run."""

    loader: PairLoader
    reference: Reference
    baseline: Baseline
    arithmetic: Arithmetic
    steps_per_epoch: float
    watch: ChosenWatch = field(default_factory=ChosenWatch)


@contextmanager
def build_dpo(config: DPOConfig, output_dir: Path | None, resume: str | None) -> Iterator[DPORun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    with ExitStack() as stack:
        opened = open_run(config, output_dir, resume, command="dpo", check=check, stack=stack)
        config, world, model_path = opened.config, opened.world, opened.model_path
        order = step_order(opened.training, config)
        with opened.watchdog.phase("load_model"):
            engine = build_policy_engine(config, opened.deepspeed, model_path, world.group)
        reference = open_reference(opened, engine, order)  # before a checkpoint is loaded
        with opened.watchdog.phase("load_model"):
            state = start_policy(opened, engine)
        run = start_run(
            opened,
            stack,
            engine=engine,
            settings=TransformersSettings(
                attention=config.model.attention, batch_size=config.validation.micro_batch_size
            ),
            state=state,
            total_steps=order.num_steps,
        )
        yield DPORun(
            **vars(run),
            loader=pair_loader(opened, opened.training, order, start_step=state.step),
            reference=reference,
            baseline=Baseline(*state.extra.get("baseline", ())),
            arithmetic=arithmetic_of(engine, world),
            steps_per_epoch=order.rows_per_epoch / config.train.global_batch_size,
        )


def pair_loader(
    opened: OpenedRun[DPOConfig], dataset: SampleDataset, steps: StepOrder | Chunks, *, start_step: int = 0
) -> PairLoader:
    return PairLoader(
        dataset,
        pair_encoder(opened.encoder),
        steps,
        opened.config,
        rank=opened.world.rank,
        world_size=opened.world.size,
        ranks_per_row=opened.world.ranks_per_row,
        exchange=gather_objects,
        start_step=start_step,
    )


def pair_batches(
    opened: OpenedRun[DPOConfig], dataset: SampleDataset, rows: Sequence[int], size: int
) -> Iterator[StepPairs]:
    """These rows in their order, `size` at a time. Collective."""
    return iter(pair_loader(opened, dataset, Chunks(rows, size)))


def open_reference(opened: OpenedRun[DPOConfig], engine: DeepSpeedEngine, order: StepOrder) -> Reference:
    """What log-ratios are taken against; `engine` has the weights that training begins with. Collective."""
    dpo = opened.config.dpo
    if dpo.reference == "none":
        return NoReference()
    if dpo.reference == "adapter_off":
        return AdapterOff(BaseReference(engine))
    if dpo.reference == "precomputed" and dpo.reference_file is None:
        return RowReference()
    model = on_rank_zero(lambda: model_fingerprint(opened.model_path))
    if dpo.reference_file is not None:
        given = on_rank_zero(partial(read_given, dpo.reference_file))
        if opened.world.rank == 0:
            given.tell_other_model(model)
        return given
    stored = on_rank_zero(lambda: open_stored(opened.output_dir, opened.checkpoint, model))
    trained = {row for step in range(order.num_steps) for row in order.indices(step)}
    held_out = evenly(len(opened.validation), opened.config.validation.max_samples)
    engine.eval()
    for part, dataset, rows in (("training", opened.training, trained), ("validation", opened.validation, held_out)):
        measure_missing(opened, engine, stored, part, dataset, stored.missing(part, rows))
    engine.train()
    release_gathered(engine)
    return stored


def measure_missing(
    opened: OpenedRun[DPOConfig],
    engine: DeepSpeedEngine,
    stored: StoredReference,
    part: str,
    dataset: SampleDataset,
    rows: Sequence[int],
) -> None:
    """Add the rows that were not measured before. Collective."""
    batches = pair_batches(opened, dataset, rows, opened.config.train.global_batch_size)
    done, told = 0, time.monotonic()
    while done < len(rows):
        with opened.watchdog.phase("data"):
            batch = next(batches)
        with opened.watchdog.phase("prepare"):
            stored.measure(engine, part, batch, opened.world)
        done += batch.num_samples + len(batch.skipped)
        if time.monotonic() - told > TELL_EVERY_S:
            log.info("reference: %d of %d %s rows measured", done, len(rows), part)
            told = time.monotonic()
    if rows:
        log.info("reference: %d %s rows measured, kept in %s", len(rows), part, stored.file)
