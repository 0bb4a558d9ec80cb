"""Global batches for SFT and DPO: their order, the training loop over them, and each step's metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.labels import build_order_parts
from dsreason.data.loader import StepBatches
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.engine.schedule import describe_long_warmup
from dsreason.job.watchdog import Watchdog
from dsreason.monitor.profile import check_profiled_steps
from dsreason.train.common.job import J
from dsreason.train.common.learning import LearningWatch
from dsreason.train.common.run import TrainingRun, Validate
from dsreason.train.common.utilisation import UtilisationMeter

log = logging.getLogger(__name__)

B = TypeVar("B", bound=StepBatches)

MANY = 0.5
"""Share of skipped rows from which a warning is logged."""
ADVICE = (
    "the log names each row and the reason after `skipped:`; for rows that are too long, raise model.max_length or lower "
    "data.vision.fps or data.vision.max_pixels; correct or remove the others"
)


@dataclass(frozen=True)
class RowCounts:
    """Row counts for one or more steps, over all ranks."""

    steps: int
    empty_steps: int
    """Number of steps that had no token to train on."""
    rows: int
    skipped: int

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.steps + other.steps,
            self.empty_steps + other.empty_steps,
            self.rows + other.rows,
            self.skipped + other.skipped,
        )


def count_rows(batches: StepBatches) -> RowCounts:
    """Count a step's rows."""
    skipped = len(batches.skipped)
    return RowCounts(1, int(batches.num_tokens == 0), batches.num_samples + skipped, skipped)


def find_row_problems(counts: RowCounts) -> dict[str, str]:
    """Return warnings keyed by problem: "empty" for steps with nothing to train on, "skipped" for many skipped rows."""
    problems, steps = {}, f"{counts.steps} step{'s' * (counts.steps > 1)}"
    if counts.empty_steps:
        problems["empty"] = (
            f"rows: {counts.empty_steps} of {steps} had no trained token, because all their rows were skipped; {ADVICE}"
        )
    if counts.skipped >= MANY * counts.rows and counts.empty_steps < counts.steps:
        problems["skipped"] = f"rows: {counts.skipped} of {counts.rows} rows ({steps}) were skipped; {ADVICE}"
    return problems


def build_step_order(training: SampleDataset, config: SFTConfig | DPOConfig) -> StepOrder:
    train = config.train
    return StepOrder(
        build_order_parts(training, config.data),
        batch_size=train.global_batch_size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        seed=train.seed,
        shuffle=config.data.shuffle,
    )


def check_steps(order: StepOrder, config: SFTConfig | DPOConfig) -> None:
    """Raise ConfigError if the run never reaches a step to be profiled. Log warnings about the number of steps."""
    check_profiled_steps(config.monitor.profile, order.num_steps)
    for note in list_step_warnings(order, config):
        log.warning("%s", note)


def list_step_warnings(order: StepOrder, config: SFTConfig | DPOConfig) -> list[str]:
    """Return warnings about the number of steps; they do not stop the run."""
    notes = []
    unused_rows = config.train.epochs * order.rows_per_epoch - order.num_steps * order.batch_size
    if unused_rows and (config.train.max_steps is None or order.num_steps < config.train.max_steps):
        notes.append(
            f"the last {unused_rows} of {config.train.epochs} x {order.rows_per_epoch} rows are not used, because they do not "
            f"fill a step of train.global_batch_size ({order.batch_size}) rows"
        )
    if note := describe_long_warmup(order.num_steps, config.optim):
        notes.append(note)
    return notes


def train_on_loader(
    run: TrainingRun[J], loader: Iterable[B], train_on_batches: Callable[[B], None], validate: Validate
) -> None:
    """Train on each global batch that `loader` yields, then finish the run."""
    watch = LearningWatch(find_row_problems)
    with run.save_before_error():
        run.begin_steps(validate)
        for batches in wait_for_batches(loader, run.job.watchdog):
            run.poll_checkpoint()
            first = run.state.step
            with run.track_step():
                train_on_batches(batches)
            watch.add(count_rows(batches))
            run.finish_steps(first, validate)
        run.finish(watch.summarize())


def wait_for_batches(loader: Iterable[B], watchdog: Watchdog) -> Iterator[B]:
    """Yield each step's batches. The time spent waiting for them counts towards the watchdog's `data` phase."""
    batches = iter(loader)
    while True:
        with watchdog.track_phase("data"):
            step_batches = next(batches, None)
        if step_batches is None:
            return
        yield step_batches


def show_batches(
    run: TrainingRun[J],
    utilisation: UtilisationMeter,
    batches: StepBatches,
    metrics: dict[str, float],
    shown: dict[str, float],
    *,
    seconds: float,
) -> None:
    """Log the metrics of the step that was just counted, and count its skipped rows.

    Args:
        metrics: the step's metrics; further metrics are added in place.
        shown: values to display in the progress bar.
        seconds: training time of the step, excluding the wait for its batches.
    """
    run.count_skipped(batches.skipped)
    step_seconds = seconds + batches.data_seconds
    metrics |= {"train/tokens": batches.num_tokens, "time/data": batches.data_seconds, "time/train": seconds}
    metrics |= utilisation.metrics(batches.work, batches.micro_batches, step_seconds)
    run.show_step(
        metrics,
        shown,
        num_samples=batches.num_samples,
        num_tokens=batches.num_input_tokens,
        seconds=step_seconds,
    )
