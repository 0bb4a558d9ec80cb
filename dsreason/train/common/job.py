"""The job that every trainer opens before it loads a model: ranks, output folder, watchdog and uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.config.deepspeed import Device, resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.output import build_default_output_dir, write_run_config
from dsreason.config.schema import JobConfig
from dsreason.files.lock import FolderLock
from dsreason.job.launch import is_started_by_us, report_and_exit
from dsreason.job.logs import setup_logs
from dsreason.job.ranks import (
    World,
    broadcast_object,
    init_world,
    run_first_rank_first,
    run_on_rank_zero,
    seed_everything,
    shutdown,
)
from dsreason.job.record import collect_run_facts
from dsreason.job.stop import StopRequest
from dsreason.job.watchdog import Watchdog
from dsreason.monitor.metrics import Metrics, open_metrics
from dsreason.storage.uploads import Uploads, open_uploads
from dsreason.train.common.preflight import check_upload
from dsreason.train.common.run_folder import compare_rows, open_output_dir

J = TypeVar("J", bound=JobConfig)
D = TypeVar("D")
"""Type of the trainer's data set."""


@dataclass(kw_only=True)
class TrainingJob(Generic[J]):
    """The resources that each rank of a run opens before it loads the model."""

    config: J
    world: World
    output_dir: Path
    checkpoint: Path | None
    """Checkpoint to continue from; None for a new run."""
    model_path: Path
    deepspeed: dict[str, Any]
    watchdog: Watchdog
    uploads: Uploads
    stop: StopRequest


def open_job(
    config: J,
    output_dir: Path | None,
    resume: str | None,
    *,
    command: str,
    check: Callable[[J], object],
    find_model: Callable[[J], Path],
    stack: ExitStack,
) -> TrainingJob[J]:
    """Join the job and open everything that does not need the model. Every rank must call this; `stack` closes the
    resources.

    Args:
        output_dir: the run folder; if None, the ranks agree on a new folder named after `command`.
        resume: checkpoint to continue from, `auto` for the newest, or None for a new run.
        check: checks data and model; called on rank 0 if a launcher other than dsreason started the ranks.
        find_model: returns the local model folder.
    """
    world = init_world()
    stop = stack.enter_context(StopRequest())
    lock = stack.enter_context(FolderLock(report_and_exit))
    # Uploads are closed after `shutdown`, so that no rank has to wait for them.
    uploads = stack.enter_context(open_uploads(config.checkpoint, lambda: stop.name))
    stack.callback(shutdown)
    output_dir = broadcast_object(output_dir or build_default_output_dir(command))
    config = config.model_copy(update={"output_dir": str(output_dir)})
    world, checkpoint = open_output_dir(output_dir, config, resume, lock, world)
    setup_logs(output_dir, world.rank)
    config.check_ranks(world.size)
    monitor = config.monitor
    watchdog = Watchdog(world, time_limit=monitor.phase_time_limit, time_limits=monitor.phase_time_limits)
    stack.enter_context(watchdog)
    stop.share(watchdog.lifeline)
    with watchdog.track_phase("preflight"):
        if not is_started_by_us():  # dsreason's own launcher has already run these checks
            run_on_rank_zero(lambda: check(config))
        run_on_rank_zero(lambda: check_upload(config, checkpoint, create=True))
    with watchdog.track_phase("open_data"), run_first_rank_first(world):
        model_path = find_model(config)
    seed_everything(config.train.seed, world.rank)
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=device, world_size=world.size)
    # Without a shared folder, every host must save the weights, also at ZeRO stages 1 and 2.
    if world.folder_ranks:
        deepspeed["checkpoint"] = {**deepspeed.get("checkpoint", {}), "use_node_local_storage": True}
    return TrainingJob(
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
    job: TrainingJob[J],
    state: TrainerState,
    stack: ExitStack,
    *,
    training: D,
    validation: D,
    digest: Callable[[D], Mapping[str, Any]],
) -> Metrics:
    """Write the run's record and open its metrics, which `stack` closes. A resumed run continues its curves after `state.step`.

    Args:
        digest: computes the digest of a data set; see `compute_rows_digest`.
    """
    config, output_dir, world = job.config, job.output_dir, job.world
    facts = collect_run_facts(world.size) | {"deepspeed": job.deepspeed, "model_path": str(job.model_path.resolve())}

    def write_record() -> None:
        current = {"training": digest(training), "held-out": digest(validation)}
        original = compare_rows(job.checkpoint, current)
        write_run_config(output_dir, config, facts | {"rows": original})

    run_on_rank_zero(write_record)
    job.uploads.add_not_uploaded(output_dir)
    metrics = open_metrics(
        output_dir,
        rank=world.rank,
        resume_step=state.step if job.checkpoint is not None else None,
        config=config.monitor,
        run_config=dump_config(config),
    )
    return stack.enter_context(metrics)
