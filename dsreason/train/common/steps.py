"""What happens around the steps of every trainer: counting and showing them, validation, checkpoints, a stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from dsreason.engine.schedule import lr_factor
from dsreason.job.logs import set_step
from dsreason.train.common.job import J, JobRun, Measured
from dsreason.train.common.saving import export_resumed, save, stop_if_asked

log = logging.getLogger(__name__)

R = TypeVar("R", bound=JobRun[Any])
Validate: TypeAlias = Callable[[R], Measured | None]
"""Measures the policy as it is; None if there is nothing to measure. Collective."""


def before_steps(run: R, validate: Validate[R]) -> None:
    """Validate what is trained from here on, unless the run is resumed; then its checkpoint gets its export."""
    config, step = run.config, run.state.step
    if step == 0 and config.validation.before_training:
        run_validation(run, validate)
    exported = is_due([step], config.checkpoint.every) or step == run.state.best_step
    if 0 < step < run.total_steps and exported and config.checkpoint.export == "all":
        export_resumed(run)
    run.profiler.begin(step + 1)


def after_steps(run: R, first: int, validate: Validate[R]) -> None:
    """Validate and save where one of the steps after `first` is due for it, and stop where a rank got a signal."""
    run.profiler.end()
    config, steps, last = run.config, range(first + 1, run.state.step + 1), run.state.step == run.total_steps
    improved = run_validation(run, validate) if last or is_due(steps, config.validation.every) else False
    due = improved or is_due(steps, config.checkpoint.every)
    if last or due:
        save(run, last=last, checkpoint=due or config.checkpoint.last)
    stop_if_asked(run)
    run.profiler.begin(run.state.step + 1)


def is_due(steps: Iterable[int], every: int) -> bool:
    """Whether one of the steps is a multiple of `every`; 0 is never."""
    return every > 0 and any(step % every == 0 for step in steps)


def learning_rate(run: JobRun[J]) -> float:
    """Of the next step."""
    return run.config.optim.lr * lr_factor(run.state.step, run.total_steps, run.config.optim)


def count_step(run: JobRun[J], *, epoch: float, extra: dict[str, Any] | None = None) -> None:
    """The engine has finished a step. `extra` is what the trainer wants back from a checkpoint; JSON values only."""
    step = run.engine.global_steps
    run.state = replace(
        run.state,
        step=step,
        epoch=epoch,
        consumed_samples=step * run.config.samples_per_step,
        extra={**(extra or {}), **run.finite.counts},
    )
    set_step(step)


def count_skipped(run: JobRun[J], rows: Sequence[str]) -> None:
    """Count rows that are left out, at every use, and log each once; a text names file, row and reason."""
    for text in rows:
        if text not in run.skipped:
            log.warning("left out: %s", text)
        run.skipped[text] += 1


def show_step(
    run: JobRun[J],
    metrics: dict[str, float],
    shown: dict[str, float],
    *,
    num_samples: int,
    num_tokens: int,
    seconds: float,
) -> None:
    """The counted step in the progress bar, with the values `shown`, and in the curves.

    Samples and tokens are those of all ranks; `seconds` is how long the step took as a whole.
    """
    step = run.state.step
    run.progress.step(step, shown, samples=num_samples, tokens=num_tokens)
    found = metrics | run.memory.take()
    found |= {
        "train/epoch": run.state.epoch,
        "train/skipped_rows": run.skipped.total(),
        "perf/tokens_per_second": num_tokens / seconds,
    }
    if step % run.config.monitor.log_every == 0 or step == run.total_steps:
        run.metrics.log_scalars(step, found)


def run_validation(run: R, validate: Validate[R]) -> bool:
    """Measure the policy; True where it is the best so far, which is worth a checkpoint."""
    config, step = run.config, run.state.step
    with run.watchdog.phase("validation"):
        result = validate(run)
    if result is None:
        return False
    run.metrics.log_scalars(step, result.metrics)
    run.progress.say(result.summary(step))
    result.write(run.output_dir, step, run.metrics, run.world)
    value, best = result.metrics.get(config.checkpoint.best_metric), run.state.best_metric
    if value is None:  # rows without answers have no loss
        return False
    better = best is None or (value < best if config.checkpoint.best_metric == "val/loss" else value > best)
    if better and step > 0:
        run.state = replace(run.state, best_metric=value, best_name=config.checkpoint.best_metric, best_step=step)
    return better and step > 0 and config.checkpoint.keep_best
