"""What SFT and GRPO open alike: job, output folder, watchdog, data, metrics, and the writer of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from deepspeed import DeepSpeedEngine

from dsreason.config.deepspeed import Device, resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.lock import FolderLock
from dsreason.config.output import default_output_dir, write_run_config
from dsreason.config.schema import RunConfig
from dsreason.config.world import check_world
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.runtime.checkpoint import TrainerState
from dsreason.runtime.checkpoint_writer import CheckpointWriter
from dsreason.runtime.launch import started_by_us
from dsreason.runtime.logs import setup_logs
from dsreason.runtime.metrics import Metrics, open_metrics
from dsreason.runtime.record import run_facts
from dsreason.runtime.stop import StopRequest
from dsreason.runtime.uploads import Uploader, uploading
from dsreason.runtime.watchdog import Watchdog, cut_short
from dsreason.runtime.world import (
    World,
    broadcast_object,
    first_rank_first,
    init_world,
    on_rank_zero,
    seed_everything,
    shutdown,
)
from dsreason.train.common.preflight import check_upload, find_model
from dsreason.train.common.run_folder import open_output_dir

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class OpenedRun(Generic[C]):
    """A run on one rank before its model is loaded."""

    config: C
    world: World
    output_dir: Path
    checkpoint: Path | None
    """To continue from."""
    model_path: Path
    deepspeed: dict[str, Any]
    training: SampleDataset
    validation: SampleDataset
    watchdog: Watchdog
    uploads: Uploader
    stop: StopRequest


def open_run(
    config: C,
    output_dir: Path | None,
    resume: str | None,
    *,
    command: str,
    check: Callable[[C], object],
    stack: ExitStack,
) -> OpenedRun[C]:
    """Join the job, and open all that needs no model, until `stack` closes. Every rank calls it.

    Args:
        output_dir: None: the ranks agree on one, named by `command`.
        check: looks at data and model, on rank 0, where a foreign launcher started the ranks.
    """
    world = init_world()
    lock = stack.enter_context(FolderLock(on_lost=cut_short))
    uploads = stack.enter_context(uploading(config.checkpoint))  # left last: no rank waits for an upload
    stack.callback(shutdown)
    stop = stack.enter_context(StopRequest())
    output_dir = broadcast_object(output_dir or default_output_dir(command))
    config = config.model_copy(update={"output_dir": str(output_dir)})
    world, checkpoint = open_output_dir(output_dir, config, resume, lock, world)
    setup_logs(output_dir, world.rank)
    check_world(config, world.size)
    monitor = config.monitor
    watchdog = Watchdog(world, time_limit=monitor.phase_time_limit, time_limits=monitor.phase_time_limits)
    stack.enter_context(watchdog)
    with watchdog.phase("preflight"):
        if not started_by_us():  # our own command has checked the same just before it started the ranks
            on_rank_zero(lambda: check(config))
        on_rank_zero(lambda: check_upload(config, checkpoint, create=True))
    with watchdog.phase("open_data"), first_rank_first(world):
        model_path = find_model(config)
        training, validation = open_datasets(config.data)
    seed_everything(config.train.seed, world.rank)
    return OpenedRun(
        config=config,
        world=world,
        output_dir=output_dir,
        checkpoint=checkpoint,
        model_path=model_path,
        deepspeed=deepspeed_of(config, world),
        training=training,
        validation=validation,
        watchdog=watchdog,
        uploads=uploads,
        stop=stop,
    )


def deepspeed_of(config: RunConfig, world: World) -> dict[str, Any]:
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    resolved = resolve_deepspeed(config.deepspeed, config, device=device, world_size=world.size)
    if world.folder_ranks:  # with the stages 1 and 2 every host needs the weights
        resolved["checkpoint"] = {**resolved.get("checkpoint", {}), "use_node_local_storage": True}
    return resolved


def record_run(run: OpenedRun[C]) -> None:
    """Write what the run is made of into its folder, and upload what an earlier job has left. Every rank calls it."""
    facts = run_facts(run.world.size) | {"deepspeed": run.deepspeed, "model_path": str(run.model_path.resolve())}
    on_rank_zero(lambda: write_run_config(run.output_dir, run.config, facts))
    run.uploads.add_left(run.output_dir)


def metrics_of(run: OpenedRun[C], state: TrainerState) -> Metrics:
    """Curves, which go on after the step of `state` where the run is resumed."""
    return open_metrics(
        run.output_dir,
        rank=run.world.rank,
        resume_step=state.step if run.checkpoint is not None else None,
        config=run.config.monitor,
        run_config=dump_config(run.config),
    )


def open_writer(run: OpenedRun[C], engine: DeepSpeedEngine, stack: ExitStack) -> CheckpointWriter:
    """What saves checkpoints, until `stack` closes. Call it when everything else is open."""
    folder, background = run.output_dir / "checkpoints", run.config.checkpoint.background
    writer = CheckpointWriter(engine, folder, run.world, background=background)
    stack.callback(writer.close)
    stack.push(run.watchdog.close_in_time)

    def make_up(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            with run.watchdog.phase("checkpoint"):
                writer.make_up()

    stack.push(make_up)
    return writer
