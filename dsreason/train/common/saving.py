"""Checkpoints and exports while a run goes on, when it is asked to stop, and at its end."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from dsreason.checkpoints.checkpoint_folder import (
    MARKER,
    as_save_error,
    delete_folder,
    exported_step,
    prune_exports,
    read_state,
)
from dsreason.errors import Stopped
from dsreason.files.step_names import named_step, step_name
from dsreason.job.ranks import on_rank_zero
from dsreason.train.common.job import J, JobRun

log = logging.getLogger(__name__)


def poll_checkpoint(run: JobRun[J]) -> None:
    """Upload and prune where a checkpoint has become complete since the last step."""
    with run.watchdog.phase("checkpoint"):
        after_checkpoint(run, run.writer.poll())


def save(run: JobRun[J], *, last: bool, checkpoint: bool = True) -> None:
    """Checkpoint, which is written beside training unless it is the last, and export where the configuration asks for it.

    Without `checkpoint` the last step is exported only.
    """
    config, step = run.config.checkpoint, run.state.step
    started = time.perf_counter()
    with run.watchdog.phase("checkpoint"), run.progress.phase("saving checkpoint"):
        after_checkpoint(run, run.writer.wait())
        if checkpoint:
            run.writer.start(step, run.state)
        if last:
            after_checkpoint(run, run.writer.wait())
    if config.export == "all" or (last and config.export == "final"):
        export(run, run.output_dir / "export" / ("final" if last else step_name(step)), last=last)
    run.metrics.log_scalars(step, {"time/save": time.perf_counter() - started})


def export_resumed(run: JobRun[J]) -> None:
    """Write the export that belongs to the checkpoint where this run continues, if it was killed between the two."""
    step = run.state.step
    checkpoint, output = run.checkpoints / step_name(step), run.output_dir / "export" / step_name(step)
    if on_rank_zero(lambda: (checkpoint / MARKER).is_file() and not (output / run.export_file).exists()):
        export(run, output, last=False)


def stop_if_asked(run: JobRun[J]) -> None:
    """Save and raise `Stopped` where a rank got a signal; a run that is done anyway goes on to its end."""
    step, name = run.state.step, run.stop.asked()
    if not name or step == run.total_steps:
        return
    if not run.config.checkpoint.saves:
        raise Stopped(
            f"stopped by {name} after step {step}; nothing is saved, because checkpoint.every is 0, and checkpoint.last and "
            "checkpoint.keep_best are false"
        )
    checkpoint = run.checkpoints / step_name(step)
    with run.watchdog.phase("checkpoint"), run.progress.phase(f"{name}: saving checkpoint"):
        after_checkpoint(run, run.writer.wait())
        if not on_rank_zero(lambda: (checkpoint / MARKER).is_file()):
            run.writer.start(step, run.state)
            after_checkpoint(run, run.writer.wait())
    raise Stopped(f"stopped by {name} after step {step}, which is saved; --resume auto continues there")


def after_checkpoint(run: JobRun[J], written: Path | None) -> None:
    """Once a checkpoint is complete, upload it, and delete those that `checkpoint.keep` no longer covers."""
    if written is None or not run.world.is_first_of_folder:
        return
    config = run.config.checkpoint
    run.metrics.log_scalars(run.state.step, {"time/save_complete": run.writer.completing})
    run.uploads.add(written, last=written.name == step_name(run.total_steps))
    # The best of now may not be on disk yet: until then the best of when this one was saved stays, too.
    bests = {run.state.best_step, read_state(written).state.best_step} if config.keep_best else set()
    run.writer.prune(config.keep, {run.checkpoints / step_name(best) for best in bests if best} | run.uploads.in_use())


def finish(run: JobRun[J]) -> None:
    """Write the export and uploads that are still missing, also of an earlier job, and say that all is done."""
    checkpoint, final = run.checkpoints / step_name(run.state.step), run.output_dir / "export" / "final"
    if run.config.checkpoint.export != "none":
        if on_rank_zero(lambda: is_outdated(final / run.export_file, checkpoint)):
            export(run, final, last=True)
        run.uploads.add(final, last=True)
    if on_rank_zero(lambda: (checkpoint / MARKER).is_file()):
        run.uploads.add(checkpoint, last=True)
    run.progress.say(run.memory.report())
    run.progress.say(f"finished at step {run.state.step}; everything is in {run.output_dir}")


def is_outdated(file: Path, checkpoint: Path) -> bool:
    """Whether the export that `file` is in is missing, of another step, or older than the checkpoint, which may be missing."""
    if not file.exists() or exported_step(file.parent) not in (None, named_step(checkpoint)):
        return True
    marker = checkpoint / MARKER
    return marker.exists() and file.stat().st_mtime < marker.stat().st_mtime


def export(run: JobRun[J], output: Path, *, last: bool) -> None:
    """Write the policy, in place of an older export of this run, and upload it."""
    config = run.config.checkpoint
    dtype = run.config.train.precision if config.export_dtype == "auto" else config.export_dtype
    on_rank_zero(lambda: delete_old_export(output))
    with run.watchdog.phase("export"), run.progress.phase("exporting"):
        run.write_export(output, dtype)
    run.uploads.add(output, last=last)
    if config.export == "all" and run.world.is_main:
        best_step = run.state.best_step if config.keep_best else None
        best = set() if best_step is None else {output.parent / step_name(best_step)}
        try:
            spared = best | run.uploads.in_use()
            prune_exports(output.parent, config.export_keep, run.state.step, spared, run.export_file)
        except OSError as error:  # no reason to end a run
            log.warning("old exports could not be deleted: %s", error)


def delete_old_export(output: Path) -> None:
    with as_save_error(output):
        delete_folder(output)
