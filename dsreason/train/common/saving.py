"""Saving of checkpoints and exports: during a run, after a signal or an error, and at the end of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dsreason.checkpoints.checkpoint_folder import (
    TrainerState,
    convert_to_save_error,
    delete_folder,
    prune_exports,
    read_exported_step,
    read_state,
)
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
from dsreason.checkpoints.export_digests import check_digests
from dsreason.checkpoints.marker import MARKER
from dsreason.errors import CheckpointError, DsReasonError, SaveError, Stopped
from dsreason.files.step_names import format_step, parse_step
from dsreason.job.ranks import run_on_rank_zero
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.progress import Progress
from dsreason.train.common.job import TrainingJob

log = logging.getLogger(__name__)

WriteExport: TypeAlias = Callable[[Path, Literal["bf16", "fp32"], TrainerState], None]
"""Type of a function that exports the policy to a folder that does not exist yet. Collective."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """A run's checkpoints and exports. Every rank must make the same calls, each with the run's current state."""

    job: TrainingJob[Any]
    writer: CheckpointWriter
    write_export: WriteExport
    export_file: str
    """Name of the file that marks a complete export; its modification time stands for that of the export."""
    metrics: Metrics
    progress: Progress
    total_steps: int
    exported: set[Path] = field(default_factory=set)
    """Exports that this job has written, so it does not check them for damage."""

    @property
    def folder(self) -> Path:
        return self.job.output_dir / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.job.output_dir / "export"

    def poll(self, state: TrainerState) -> None:
        """If a checkpoint has become complete since the last step, upload it and delete old ones."""
        with self.job.watchdog.track_phase("checkpoint"):
            self.upload_and_prune(self.writer.poll(), state)

    def save(self, state: TrainerState, *, last: bool, checkpoint: bool = True) -> None:
        """Write a checkpoint, and an export if the configuration requires one.

        Args:
            last: whether this is the last step of the run; its checkpoint is completed before the method returns.
            checkpoint: whether to write a checkpoint; if False, only an export is written.
        """
        config, step, started = self.job.config.checkpoint, state.step, time.perf_counter()
        with self.job.watchdog.track_phase("checkpoint"), self.progress.track_phase("saving checkpoint"):
            self.upload_and_prune(self.writer.wait(), state)
            if checkpoint:
                self.writer.start(step, state)
            if last:
                self.upload_and_prune(self.writer.wait(), state)
        if config.export == "all" or (last and config.export == "final"):
            self.export(self.exports / ("final" if last else format_step(step)), state, last=last)
        self.metrics.log_scalars(step, {"time/save": time.perf_counter() - started})

    def export_resumed(self, state: TrainerState) -> None:
        """Write the export for the resumed checkpoint if the earlier job was killed before it could write it."""
        checkpoint, output = self.folder / format_step(state.step), self.exports / format_step(state.step)
        if run_on_rank_zero(lambda: (checkpoint / MARKER).is_file() and not is_sound(output / self.export_file)):
            self.export(output, state, last=False)

    def stop_if_signalled(self, state: TrainerState) -> None:
        """Raise `Stopped` if any rank has received a signal; do nothing after the last step."""
        name = self.job.stop.asked()
        if name and state.step != self.total_steps:
            raise Stopped(f"stopped by {name}")

    def save_before_error(self, error: DsReasonError, state: TrainerState) -> None:
        """Save the last finished step unless it has already been saved, and add the outcome to the message of `error`.

        Raises:
            SaveError: the step could not be saved, and `error` was only a request to stop.
        """
        step, is_stop = state.step, isinstance(error, Stopped)
        outcome = "is saved"
        if step == 0:
            error.args = (f"{error} before the first step was finished; nothing is saved",) if is_stop else error.args
            return
        if not self.job.config.checkpoint.saves:
            outcome = (
                "is not saved, because checkpoint.every is 0, and checkpoint.last and checkpoint.keep_best are false"
            )
        else:
            try:
                self.save_if_missing(state)
            except SaveError as failure:
                if is_stop:
                    raise
                outcome = f"could not be saved: {failure}"
        advice = "; continue with --resume auto" if outcome == "is saved" else ""
        text = (
            f"{error} after step {step}, which {outcome}"
            if is_stop
            else f"{error}\nThe last finished step, {step}, {outcome}"
        )
        error.args = (f"{text}{advice}",)

    def save_if_missing(self, state: TrainerState) -> None:
        """Complete the pending checkpoint, then write one for the current step if it has none. Return once it is complete."""
        checkpoint = self.folder / format_step(state.step)
        with self.job.watchdog.track_phase("checkpoint"), self.progress.track_phase("saving checkpoint"):
            self.upload_and_prune(self.writer.wait(), state)
            if not run_on_rank_zero(lambda: (checkpoint / MARKER).is_file()):
                self.writer.start(state.step, state)
                self.upload_and_prune(self.writer.wait(), state)

    def upload_and_prune(self, written: Path | None, state: TrainerState) -> None:
        """Upload the checkpoint `written`, if any, and delete old checkpoints beyond `checkpoint.keep`."""
        job = self.job
        if written is None or not job.world.is_first_of_folder:
            return
        config = job.config.checkpoint
        self.metrics.log_scalars(state.step, {"time/save_complete": self.writer.completing})
        job.uploads.add(written, last=written.name == format_step(self.total_steps))
        # The best checkpoint may not be on disk yet. Until it is, also keep the one that was best when `written` was saved.
        bests = {state.best_step, read_state(written).state.best_step} if config.keep_best else set()
        spared = {self.folder / format_step(best) for best in bests if best} | job.uploads.list_in_use()
        self.writer.prune(config.keep, spared)

    def finish(self, state: TrainerState) -> None:
        """Write the final export if it is missing or outdated, and upload it and the last checkpoint."""
        checkpoint, final = self.folder / format_step(state.step), self.exports / "final"
        if self.job.config.checkpoint.export != "none":
            if run_on_rank_zero(
                lambda: final not in self.exported and is_outdated(final / self.export_file, checkpoint)
            ):
                self.export(final, state, last=True)
            self.job.uploads.add(final, last=True)
        if run_on_rank_zero(lambda: (checkpoint / MARKER).is_file()):
            self.job.uploads.add(checkpoint, last=True)

    def export(self, output: Path, state: TrainerState, *, last: bool) -> None:
        """Export the policy to `output`, replacing an older export, and upload it."""
        job, config = self.job, self.job.config.checkpoint
        dtype = job.config.train.precision if config.export_dtype == "auto" else config.export_dtype
        run_on_rank_zero(lambda: delete_old_export(output))
        with job.watchdog.track_phase("export"), self.progress.track_phase("exporting"):
            self.write_export(output, dtype, state)
        self.exported.add(output)
        job.uploads.add(output, last=last)
        if config.export == "all" and job.world.is_main:
            best_step = state.best_step if config.keep_best else None
            best = set() if best_step is None else {output.parent / format_step(best_step)}
            try:
                spared = best | job.uploads.list_in_use()
                prune_exports(output.parent, config.export_keep, state.step, spared, self.export_file)
            except OSError as error:  # the run can continue anyway
                log.warning("old exports could not be deleted: %s", error)


def is_sound(file: Path) -> bool:
    """Return whether the export marked by `file` exists and none of its files is damaged; log a warning if one is."""
    if not file.exists():
        return False
    try:
        check_digests(file.parent)
    except CheckpointError as error:
        log.warning("%s. Replacing the damaged export", error)
        return False
    return True


def is_outdated(file: Path, checkpoint: Path) -> bool:
    """Return whether the export marked by `file` is missing, damaged, from a different step, or older than the checkpoint."""
    if not is_sound(file) or read_exported_step(file.parent) not in (None, parse_step(checkpoint)):
        return True
    marker = checkpoint / MARKER
    return marker.exists() and file.stat().st_mtime < marker.stat().st_mtime


def delete_old_export(output: Path) -> None:
    with convert_to_save_error(output):
        delete_folder(output)
