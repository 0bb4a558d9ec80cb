"""A run of one rank without DeepSpeed, for what happens around its steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.job.ranks import World
from dsreason.monitor.memory import MemoryLedger
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.profile import StepProfiler
from dsreason.monitor.progress import Progress
from dsreason.storage.uploads import Uploads
from dsreason.train.common.job import TrainingJob
from dsreason.train.common.nonfinite import build_finite_check
from dsreason.train.common.run import TrainingRun
from dsreason.train.common.saving import Checkpoints, WriteExport


class WriterStandIn:
    """Notes the steps of the checkpoints that it is asked for, and what may be deleted."""

    completing = 0.0

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.states: list[TrainerState] = []
        self.pruned: list[tuple[int, set[str]]] = []

    def start(self, step: int, state: TrainerState) -> None:
        self.steps.append(step)
        self.states.append(state)

    def wait(self) -> None:
        """No checkpoint is ever complete."""

    def poll(self) -> None:
        """No checkpoint is ever complete."""

    def prune(self, keep: int, spared: set[Path]) -> None:
        self.pruned.append((keep, {path.name for path in spared}))


class UploadsStandIn(Uploads):
    """Notes the folders to upload."""

    def __init__(self) -> None:
        super().__init__([])
        self.added: list[str] = []
        self.waiting: set[Path] = set()

    def add(self, folder: Path, *, last: bool) -> None:
        self.added.append(folder.name)

    def list_in_use(self) -> set[Path]:
        return self.waiting


def refuse_export(output: Path, dtype: str, state: TrainerState) -> None:
    raise AssertionError(f"{output} is not expected to be written")


def make_job(config: Any, output_dir: Path, *, asked: Callable[[], str] = str) -> TrainingJob[Any]:
    """Make a job of one rank whose watchdog watches nothing. `asked` gives the signal that asks it to stop."""
    watchdog: Any = SimpleNamespace(track_phase=lambda name: nullcontext())
    stop: Any = SimpleNamespace(asked=asked)
    return TrainingJob(
        config=config,
        world=World(0, 0, 1, torch.device("cpu")),
        output_dir=output_dir,
        checkpoint=None,
        model_path=output_dir,
        deepspeed={},
        watchdog=watchdog,
        uploads=UploadsStandIn(),
        stop=stop,
    )


def make_run(
    job: TrainingJob[Any], state: TrainerState, *, total_steps: int = 10, write_export: WriteExport = refuse_export
) -> TrainingRun[Any]:
    metrics, progress, writer = Metrics(), Progress(), WriterStandIn()
    checkpoints = Checkpoints(
        job=job,
        writer=writer,  # type: ignore[arg-type]
        write_export=write_export,
        export_file="config.json",
        metrics=metrics,
        progress=progress,
        total_steps=total_steps,
    )
    return TrainingRun(
        job=job,
        engine=SimpleNamespace(global_steps=state.step),  # type: ignore[arg-type]
        metrics=metrics,
        progress=progress,
        memory=MemoryLedger(job.world.device),
        profiler=StepProfiler((), job.output_dir, job.world.device, progress),
        checkpoints=checkpoints,
        finite=build_finite_check(job.config, job.output_dir, job.world, state),
        total_steps=total_steps,
        state=state,
    )
