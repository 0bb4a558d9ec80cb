"""One run on one rank: what happens around the steps of every trainer, whatever it trains."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias

from deepspeed import DeepSpeedEngine

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
from dsreason.engine.average import WeightAverage
from dsreason.engine.schedule import lr_factor
from dsreason.job.logs import set_step
from dsreason.job.ranks import World
from dsreason.monitor.memory import MemoryLedger
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.profile import FOLDER as PROFILE_FOLDER
from dsreason.monitor.profile import StepProfiler
from dsreason.monitor.progress import Progress, open_progress
from dsreason.train.common.job import J, TrainingJob
from dsreason.train.common.nonfinite import FiniteCheck, finite_check
from dsreason.train.common.saving import Checkpoints, WriteExport

log = logging.getLogger(__name__)


class Measured(Protocol):
    """What a validation found, equal on all ranks."""

    @property
    def metrics(self) -> dict[str, float]: ...

    def summary(self, step: int) -> str:
        """One line for a person."""

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """Write what is shown beside the metrics."""


Validate: TypeAlias = Callable[[int], Measured | None]
"""Measures the policy as it is after a step; None if there is nothing to measure. Collective."""


@dataclass(kw_only=True)
class TrainingRun(Generic[J]):
    """A run between its first step and its last: what counts, shows, validates and saves its steps.

    A trainer calls `before_steps`, then for each step `poll_checkpoint`, `count_step` and `show_step`, after one or several
    steps `after_steps`, and at the end `finish`. `state` says how far the run is.
    """

    job: TrainingJob[J]
    engine: DeepSpeedEngine
    metrics: Metrics
    progress: Progress
    memory: MemoryLedger
    profiler: StepProfiler
    checkpoints: Checkpoints
    finite: FiniteCheck
    total_steps: int
    state: TrainerState
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows that training has left out since this process started, one text each, and how often."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        optim = self.job.config.optim
        return optim.lr * lr_factor(self.state.step, self.total_steps, optim)

    def before_steps(self, validate: Validate) -> None:
        """Validate what is trained from here on, unless the run is resumed; then its checkpoint gets its export."""
        config, step = self.job.config, self.state.step
        if step == 0 and config.validation.before_training:
            self.validate(validate)
        is_exported = is_due([step], config.checkpoint.every) or step == self.state.best_step
        if 0 < step < self.total_steps and is_exported and config.checkpoint.export == "all":
            self.checkpoints.export_resumed(self.state)
        self.profiler.begin(step + 1)

    def poll_checkpoint(self) -> None:
        """Upload and prune if a checkpoint has become complete since the last step."""
        self.checkpoints.poll(self.state)

    def count_step(self, *, epoch: float, extra: Mapping[str, Any] | None = None) -> None:
        """Count a step that the engine has finished.

        `extra` is what the trainer wants back from a checkpoint; JSON values only.
        """
        step = self.engine.global_steps
        self.state = replace(
            self.state,
            step=step,
            epoch=epoch,
            consumed_samples=step * self.job.config.samples_per_step,
            extra={**(extra or {}), **self.finite.counts},
        )
        set_step(step)

    def count_skipped(self, rows: Sequence[str]) -> None:
        """Count rows that are left out, at every use, and log each once; a text names file, row and reason."""
        for text in rows:
            if text not in self.skipped:
                log.warning("left out: %s", text)
            self.skipped[text] += 1

    def show_step(
        self,
        metrics: Mapping[str, float],
        shown: Mapping[str, float],
        *,
        num_samples: int,
        num_tokens: int,
        seconds: float,
    ) -> None:
        """Show the counted step in the curves and, with the values `shown`, in the progress bar.

        Samples and tokens are those of all ranks; `seconds` is how long the step took as a whole.
        """
        step = self.state.step
        self.progress.step(step, dict(shown), samples=num_samples, tokens=num_tokens)
        values = {
            **metrics,
            **self.memory.take(),
            "train/epoch": self.state.epoch,
            "train/skipped_rows": self.skipped.total(),
            "perf/tokens_per_second": num_tokens / seconds,
        }
        if step % self.job.config.monitor.log_every == 0 or step == self.total_steps:
            self.metrics.log_scalars(step, values)

    def after_steps(self, first: int, validate: Validate) -> None:
        """Validate and save if one of the steps after `first` is due for it, and stop if a rank got a signal."""
        self.profiler.end()
        config, last = self.job.config, self.state.step == self.total_steps
        steps = range(first + 1, self.state.step + 1)
        improved = self.validate(validate) if last or is_due(steps, config.validation.every) else False
        due = improved or is_due(steps, config.checkpoint.every)
        if last or due:
            self.checkpoints.save(self.state, last=last, checkpoint=due or config.checkpoint.last)
        self.checkpoints.stop_if_asked(self.state)
        self.profiler.begin(self.state.step + 1)

    def validate(self, validate: Validate) -> bool:
        """Measure the policy; True if it is the best so far, which is worth a checkpoint."""
        job, step = self.job, self.state.step
        config = job.config.checkpoint
        with job.watchdog.phase("validation"):
            result = validate(step)
        if result is None:
            return False
        self.metrics.log_scalars(step, result.metrics)
        self.progress.say(result.summary(step))
        result.write(job.output_dir, step, self.metrics, job.world)
        value, best = result.metrics.get(config.best_metric), self.state.best_metric
        if value is None:  # rows without answers have no loss
            return False
        better = best is None or (value < best if config.best_metric == "val/loss" else value > best)
        if better and step > 0:
            self.state = replace(self.state, best_metric=value, best_name=config.best_metric, best_step=step)
        return better and step > 0 and config.keep_best

    def finish(self) -> None:
        """Write the export and uploads that are still missing, also of an earlier job, and say that all is done."""
        self.checkpoints.finish(self.state)
        self.progress.say(self.memory.report())
        self.progress.say(f"finished at step {self.state.step}; everything is in {self.job.output_dir}")


def start_run(
    job: TrainingJob[J],
    stack: ExitStack,
    *,
    engine: DeepSpeedEngine,
    metrics: Metrics,
    memory: MemoryLedger,
    state: TrainerState,
    total_steps: int,
    write_export: WriteExport,
    export_file: str = "config.json",
    averages: Mapping[str, WeightAverage] | None = None,
    with_frozen: bool = True,
) -> TrainingRun[J]:
    """Open the run around `engine`, its progress and its checkpoints, until `stack` closes. Every rank calls it.

    Args:
        export_file: see `Checkpoints`.
        averages: other weights that checkpoints hold, by name.
        with_frozen: whether checkpoints hold the weights that are not trained.
    """
    config, world = job.config, job.world
    folder, background = job.output_dir / "checkpoints", config.checkpoint.background
    writer = CheckpointWriter(engine, folder, world, background=background, averages=averages, with_frozen=with_frozen)
    progress = stack.enter_context(open_progress(rank=world.rank, total_steps=total_steps, first_step=state.step))
    profiled_steps = config.monitor.profile if world.is_main else ()
    profiler = StepProfiler(profiled_steps, job.output_dir / PROFILE_FOLDER, world.device, progress)
    stack.enter_context(profiler)
    close_at_end(writer, job, stack)
    checkpoints = Checkpoints(
        job=job,
        writer=writer,
        write_export=write_export,
        export_file=export_file,
        metrics=metrics,
        progress=progress,
        total_steps=total_steps,
    )
    return TrainingRun(
        job=job,
        engine=engine,
        metrics=metrics,
        progress=progress,
        memory=memory,
        profiler=profiler,
        checkpoints=checkpoints,
        finite=finite_check(config, job.output_dir, world, state),
        total_steps=total_steps,
        state=state,
    )


def close_at_end(writer: CheckpointWriter, job: TrainingJob[J], stack: ExitStack) -> None:
    """Close the writer with `stack`; if the run ends by an error, it first completes what it can."""
    stack.callback(writer.close)
    stack.push(job.watchdog.close_in_time)

    def complete_pending(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            with job.watchdog.phase("checkpoint"):
                writer.complete_pending()

    stack.push(complete_pending)


def is_due(steps: Iterable[int], every: int) -> bool:
    """Return whether one of the steps is a multiple of `every`; 0 is never."""
    return every > 0 and any(step % every == 0 for step in steps)
