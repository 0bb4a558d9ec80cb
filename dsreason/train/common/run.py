"""A training run on one rank: the work between steps that all trainers have in common."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias

from deepspeed import DeepSpeedEngine

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter, wait_for_all_ranks
from dsreason.engine.average import WeightAverage
from dsreason.engine.schedule import compute_lr_factor
from dsreason.errors import DsReasonError, MismatchError, NothingLearned, SaveError
from dsreason.job.logs import set_step
from dsreason.job.ranks import World
from dsreason.monitor.memory import MemoryLedger
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.profile import FOLDER as PROFILE_FOLDER
from dsreason.monitor.profile import StepProfiler
from dsreason.monitor.progress import Progress, open_progress
from dsreason.train.common.job import J, TrainingJob
from dsreason.train.common.nonfinite import FiniteCheck, build_finite_check
from dsreason.train.common.page import RunPage
from dsreason.train.common.saving import Checkpoints, WriteExport

log = logging.getLogger(__name__)

TRIAL_STEPS = 2
"""Maximum number of steps in a trial run, which only tests the setup and is not expected to learn anything."""
IDLE_STEPS = "idle_steps"
"""Key in `TrainerState.extra`: number of steps that had nothing to learn from."""
UNVALIDATED = "unvalidated"
"""Key in `TrainerState.extra`: whether the validation that was due after this step was interrupted."""


class ValidationOutcome(Protocol):
    """The result of a validation, identical on all ranks."""

    @property
    def metrics(self) -> dict[str, float]: ...

    def summary(self, step: int) -> str:
        """Return a one-line summary for the log."""

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """Write everything except the metrics: answers, contact sheets and clips."""


Validate: TypeAlias = Callable[[int], ValidationOutcome | None]
"""Type of a function that validates the policy after a step; it returns None if there is nothing to measure. Collective."""


@dataclass(kw_only=True)
class TrainingRun(Generic[J]):
    """A run from its first step to its last. It counts and logs steps, validates the policy and saves checkpoints.

    A trainer calls `begin_steps` first. For each step, it then calls `poll_checkpoint`, `count_step` and `show_step`; after
    one or more steps, `finish_steps`; and at the end, `finish`. All of these calls are made within `save_before_error`. The
    forward and backward passes and the optimizer step, up to `count_step`, run within `track_step`. `state` is the run's
    progress.
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
    page: RunPage | None = None
    """The run's page; None on ranks other than 0, and for world models, whose page is written by their validation."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Message that names a skipped row → number of times that the row has been skipped since this process started."""
    is_in_step: bool = False
    """Whether a step has begun but not finished, in which case only some ranks may have updated their weights."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        optim = self.job.config.optim
        return optim.lr * compute_lr_factor(self.state.step, self.total_steps, optim)

    def begin_steps(self, validate: Validate) -> None:
        """Validate before the first step if configured; in a resumed run, make up for an interrupted validation and export."""
        config, step = self.job.config, self.state.step
        if (step == 0 and config.validation.before_training) or self.state.extra.get(UNVALIDATED):
            self.validate(validate)
        is_exported = is_due([step], config.checkpoint.every) or step == self.state.best_step
        if 0 < step < self.total_steps and is_exported and config.checkpoint.export == "all":
            self.checkpoints.export_resumed(self.state)
        self.profiler.begin(step + 1)

    @contextmanager
    def save_before_error(self) -> Iterator[None]:
        """If the block ends with an error between two steps, save the last finished step first and say so in the message.

        A MismatchError counts as an error between two steps, because no rank has updated its weights yet.

        Saving is collective, so nothing is saved unless all ranks fail in this way within seconds of each other. Functions
        that wait for data, rewards or a teacher therefore raise one rank's error, or its stop request, on all ranks
        (`share_errors`).
        """
        try:
            yield
        except DsReasonError as error:
            is_before_update = not self.is_in_step or isinstance(error, MismatchError)
            is_between_steps = is_before_update and self.engine.global_steps == self.state.step
            is_sound = is_between_steps and not isinstance(error, SaveError)
            if is_sound and wait_for_all_ranks(self.job.world, "save before an error"):
                self.checkpoints.save_before_error(error, self.state)
            raise

    @contextmanager
    def track_step(self) -> Iterator[None]:
        """Mark the block as an optimizer step, and apply the time limit for steps. If the block fails, its state is not saved."""
        self.is_in_step = True
        with self.job.watchdog.track_phase("step"):
            yield
        self.is_in_step = False

    def poll_checkpoint(self) -> None:
        """If a checkpoint has become complete since the last step, upload it and delete old ones."""
        self.checkpoints.poll(self.state)

    def count_step(self, *, epoch: float, extra: Mapping[str, Any] | None = None, learned: bool = True) -> None:
        """Update the run's state after the engine has finished a step.

        Args:
            epoch: number of epochs completed, including a fraction.
            extra: JSON values to save in checkpoints, because the trainer needs them after a resume.
            learned: whether the step had anything to learn from: a trained token or an advantage other than 0.
        """
        step = self.engine.global_steps
        idle_steps = self.state.extra.get(IDLE_STEPS, 0) + (not learned)
        self.state = replace(
            self.state,
            step=step,
            epoch=epoch,
            consumed_samples=step * self.job.config.samples_per_step,
            extra={**(extra or {}), **self.finite.counts, IDLE_STEPS: idle_steps},
        )
        set_step(step)

    def count_skipped(self, rows: Sequence[str]) -> None:
        """Count skipped rows, and log each row once.

        Args:
            rows: one message per skipped row, with its file, row number and reason.
        """
        for text in rows:
            if text not in self.skipped:
                log.warning("skipped: %s", text)
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
        """Log the step that was just counted to the curves, and update the progress bar.

        Args:
            shown: values to display in the progress bar.
            num_samples: number of samples in the step, over all ranks.
            num_tokens: number of tokens in the step, over all ranks.
            seconds: duration of the entire step.
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

    def finish_steps(self, first: int, validate: Validate) -> None:
        """Validate and save, each if it was due in any step after `first`; stop if any rank has received a signal."""
        self.profiler.end()
        config, last = self.job.config, self.state.step == self.total_steps
        steps = range(first + 1, self.state.step + 1)
        improved = self.validate(validate) if last or is_due(steps, config.validation.every) else False
        due = improved or is_due(steps, config.checkpoint.every)
        if last or due:
            self.checkpoints.save(self.state, last=last, checkpoint=due or config.checkpoint.last)
        self.checkpoints.stop_if_signalled(self.state)
        self.profiler.begin(self.state.step + 1)

    def validate(self, validate: Validate) -> bool:
        """Validate the policy; return True if it is the best so far and `checkpoint.keep_best` requires a checkpoint of it."""
        job, step = self.job, self.state.step
        config = job.config.checkpoint
        extra = {key: value for key, value in self.state.extra.items() if key != UNVALIDATED}
        self.state = replace(self.state, extra={**extra, UNVALIDATED: True})  # saved if the validation is interrupted
        with job.watchdog.track_phase("validation"):
            result = validate(step)
        self.state = replace(self.state, extra=extra)
        if result is None:
            return False
        self.metrics.log_scalars(step, result.metrics)
        self.progress.print_line(result.summary(step))
        result.write(job.output_dir, step, self.metrics, job.world)
        if self.page:
            self.page.update()
        value, best = result.metrics.get(config.best_metric), self.state.best_metric
        if value is None:  # rows without answers have no loss
            return False
        is_better = best is None or (value < best if config.best_metric == "val/loss" else value > best)
        if is_better and step > 0:
            self.state = replace(self.state, best_metric=value, best_name=config.best_metric, best_step=step)
        return is_better and step > 0 and config.keep_best

    def finish(self, problems: Sequence[str] = ()) -> None:
        """Write and upload all checkpoints and exports that are still missing, including those of an earlier job, and print
        the final messages.

        Args:
            problems: reasons why the run may not have learned; printed first.

        Raises:
            NothingLearned: the run had more than `TRIAL_STEPS` steps, and none of them had anything to learn from.
        """
        step = self.state.step
        self.checkpoints.finish(self.state)
        has_learned = self.state.extra.get(IDLE_STEPS, 0) < max(step, 1)
        verdict = (
            f"nothing was learned in the {step} step{'s' * (step > 1)}, so the model is no better than at the start"
        )
        lines = [*problems] if has_learned else [verdict, *problems]
        for line in lines:
            self.progress.print_line(f"warning: {line}")
        self.progress.print_line(self.memory.report())
        if self.page:
            self.page.write()
            for line in self.page.describe_run():
                self.progress.print_line(line)
        self.progress.print_line(f"finished at step {step}; all output is in {self.job.output_dir}")
        if not has_learned and step > TRIAL_STEPS:
            raise NothingLearned("\n  ".join(lines))


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
    page: RunPage | None = None,
) -> TrainingRun[J]:
    """Open the run with its progress bar, profiler and checkpoints; `stack` closes them. Every rank must call this.

    Args:
        export_file: see `Checkpoints`.
        averages: weight averages to include in checkpoints, by name.
        with_frozen: whether checkpoints contain the weights that are not trained.
        page: the run's page; see `TrainingRun`.
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
        finite=build_finite_check(config, job.output_dir, world, state),
        total_steps=total_steps,
        state=state,
        page=page,
    )


def close_at_end(writer: CheckpointWriter, job: TrainingJob[J], stack: ExitStack) -> None:
    """Close the writer when `stack` closes; if the run ends with an error, complete pending checkpoints first."""
    stack.callback(writer.close)
    stack.push(job.watchdog.close_in_time)

    def complete_pending(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            with job.watchdog.track_phase("checkpoint"):
                writer.finish_pending()

    stack.push(complete_pending)


def is_due(steps: Iterable[int], every: int) -> bool:
    """Return whether any of the steps is a multiple of `every`; always False if `every` is 0."""
    return every > 0 and any(step % every == 0 for step in steps)
