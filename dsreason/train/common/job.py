"""The parts of a run that every trainer has, whatever it trains, and what opens them: first without a model, then around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar

from deepspeed import DeepSpeedEngine

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
from dsreason.config.deepspeed import Device, resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.output import default_output_dir, write_run_config
from dsreason.config.schema import JobConfig
from dsreason.engine.average import WeightAverage
from dsreason.files.lock import FolderLock
from dsreason.job.launch import report_and_exit, started_by_us
from dsreason.job.logs import setup_logs
from dsreason.job.ranks import (
    World,
    broadcast_object,
    first_rank_first,
    init_world,
    on_rank_zero,
    seed_everything,
    shutdown,
)
from dsreason.job.record import run_facts
from dsreason.job.stop import StopRequest
from dsreason.job.watchdog import Watchdog
from dsreason.monitor.memory import MemoryLedger
from dsreason.monitor.metrics import Metrics, open_metrics
from dsreason.monitor.profile import FOLDER as PROFILE_FOLDER
from dsreason.monitor.profile import StepProfiler
from dsreason.monitor.progress import Progress, open_progress
from dsreason.storage.uploads import Uploads, uploading
from dsreason.train.common.nonfinite import FiniteCheck, finite_check
from dsreason.train.common.preflight import check_upload
from dsreason.train.common.run_folder import compare_rows, open_output_dir

J = TypeVar("J", bound=JobConfig)
D = TypeVar("D")
"""Data."""


@dataclass(kw_only=True)
class OpenedJob(Generic[J]):
    """A run on one rank before its model is loaded."""

    config: J
    world: World
    output_dir: Path
    checkpoint: Path | None
    """To continue from."""
    model_path: Path
    deepspeed: dict[str, Any]
    watchdog: Watchdog
    uploads: Uploads
    stop: StopRequest


class Measured(Protocol):
    """What a validation found, equal on all ranks."""

    @property
    def metrics(self) -> dict[str, float]: ...

    def summary(self, step: int) -> str:
        """One line for a person."""

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """What is shown beside the metrics."""


@dataclass(kw_only=True)
class JobRun(OpenedJob[J]):
    """The parts of a run on one rank; `state` says how far it is.

    A trainer's own run is this with more, and says how it is exported.
    """

    engine: DeepSpeedEngine
    metrics: Metrics
    progress: Progress
    memory: MemoryLedger
    profiler: StepProfiler
    writer: CheckpointWriter
    finite: FiniteCheck
    total_steps: int
    state: TrainerState
    skipped: Counter[str] = field(default_factory=Counter)
    """Rows that training has left out since this process started, one text each, and how often."""

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def export_file(self) -> str:
        """In every export; how new it is says how new the export is."""
        return "config.json"

    def write_export(self, output: Path, dtype: Literal["bf16", "fp32"]) -> None:
        """Write the policy into a folder that is not there yet. Collective."""
        raise NotImplementedError


def open_job(
    config: J,
    output_dir: Path | None,
    resume: str | None,
    *,
    command: str,
    check: Callable[[J], object],
    find_model: Callable[[J], Path],
    stack: ExitStack,
) -> OpenedJob[J]:
    """Join the job, and open all that needs no model, until `stack` closes. Every rank calls it.

    Args:
        output_dir: None: the ranks agree on one, named by `command`.
        check: looks at data and model, on rank 0, where a foreign launcher started the ranks.
        find_model: the local model folder.
    """
    world = init_world()
    stop = stack.enter_context(StopRequest())
    lock = stack.enter_context(FolderLock(report_and_exit, lambda: stop.name))
    uploads = stack.enter_context(uploading(config.checkpoint, lambda: stop.name))  # no rank waits for an upload
    stack.callback(shutdown)
    output_dir = broadcast_object(output_dir or default_output_dir(command))
    config = config.model_copy(update={"output_dir": str(output_dir)})
    world, checkpoint = open_output_dir(output_dir, config, resume, lock, world)
    setup_logs(output_dir, world.rank)
    config.check_ranks(world.size)
    monitor = config.monitor
    watchdog = Watchdog(world, time_limit=monitor.phase_time_limit, time_limits=monitor.phase_time_limits)
    stack.enter_context(watchdog)
    with watchdog.phase("preflight"):
        if not started_by_us():  # our own command has checked the same just before it started the ranks
            on_rank_zero(lambda: check(config))
        on_rank_zero(lambda: check_upload(config, checkpoint, create=True))
    with watchdog.phase("open_data"), first_rank_first(world):
        model_path = find_model(config)
    seed_everything(config.train.seed, world.rank)
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=device, world_size=world.size)
    if world.folder_ranks:  # with the stages 1 and 2 every host needs the weights
        deepspeed["checkpoint"] = {**deepspeed.get("checkpoint", {}), "use_node_local_storage": True}
    return OpenedJob(
        config=config,
        world=world,
        output_dir=output_dir,
        checkpoint=checkpoint,
        model_path=model_path,
        deepspeed=deepspeed,
        watchdog=watchdog,
        uploads=uploads,
        stop=stop,
    )


def open_curves(
    opened: OpenedJob[J],
    state: TrainerState,
    stack: ExitStack,
    *,
    training: D,
    validation: D,
    digest: Callable[[D], Mapping[str, Any]],
) -> Metrics:
    """The run's record and its curves, until `stack` closes. They go on after the step of `state` in a resumed run.

    Args:
        digest: of one of the two, see `rows_digest`.
    """
    config, output_dir, world = opened.config, opened.output_dir, opened.world
    facts = run_facts(world.size) | {"deepspeed": opened.deepspeed, "model_path": str(opened.model_path.resolve())}

    def write_record() -> None:
        now = {"training": digest(training), "held-out": digest(validation)}
        remembered = compare_rows(opened.checkpoint, now)
        write_run_config(output_dir, config, facts | {"rows": remembered})

    on_rank_zero(write_record)
    opened.uploads.add_not_uploaded(output_dir)
    metrics = open_metrics(
        output_dir,
        rank=world.rank,
        resume_step=state.step if opened.checkpoint is not None else None,
        config=config.monitor,
        run_config=dump_config(config),
    )
    return stack.enter_context(metrics)


def start_job(
    opened: OpenedJob[J],
    stack: ExitStack,
    *,
    engine: DeepSpeedEngine,
    metrics: Metrics,
    memory: MemoryLedger,
    state: TrainerState,
    total_steps: int,
    averages: Mapping[str, WeightAverage] | None = None,
    with_frozen: bool = True,
) -> JobRun[J]:
    """The run around `engine`: its progress and checkpoints, until `stack` closes. Every rank calls it.

    Args:
        averages: other weights that checkpoints hold, by name.
        with_frozen: whether they hold the weights that are not trained.
    """
    config, world = opened.config, opened.world
    folder, background = opened.output_dir / "checkpoints", config.checkpoint.background
    writer = CheckpointWriter(engine, folder, world, background=background, averages=averages, with_frozen=with_frozen)
    progress = stack.enter_context(open_progress(rank=world.rank, total_steps=total_steps, first_step=state.step))
    profiled_steps = config.monitor.profile if world.is_main else ()
    profiler = StepProfiler(profiled_steps, opened.output_dir / PROFILE_FOLDER, world.device, progress)
    return JobRun(
        **{name: vars(opened)[name] for name in OpenedJob.__dataclass_fields__},
        engine=engine,
        metrics=metrics,
        progress=progress,
        memory=memory,
        profiler=stack.enter_context(profiler),
        writer=closing_writer(writer, opened, stack),
        finite=finite_check(config, opened.output_dir, world, state),
        total_steps=total_steps,
        state=state,
    )


def closing_writer(writer: CheckpointWriter, opened: OpenedJob[J], stack: ExitStack) -> CheckpointWriter:
    """The writer, which is closed with `stack`, and completes what it can where a run ends by an error."""
    stack.callback(writer.close)
    stack.push(opened.watchdog.close_in_time)

    def complete_pending(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            with opened.watchdog.phase("checkpoint"):
                writer.complete_pending()

    stack.push(complete_pending)
    return writer
