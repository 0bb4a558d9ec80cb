"""The parts of a run that every trainer has, and what opens them: first without a model, then around it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from deepspeed import DeepSpeedEngine

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
from dsreason.config.deepspeed import Device, resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.output import default_output_dir, write_run_config
from dsreason.config.schema import RunConfig
from dsreason.data.chat import Encoder
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.engine.engine import build_engine
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
from dsreason.models.freeze import freeze
from dsreason.models.load import enable_gradient_checkpointing, load_model
from dsreason.models.policy import Policy
from dsreason.monitor.memory import MemoryLedger
from dsreason.monitor.metrics import Metrics, open_metrics
from dsreason.monitor.progress import Progress, open_progress
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.opening import EngineSettings, open_rollout_engine
from dsreason.storage.uploads import Uploads, uploading
from dsreason.train.common.nonfinite import FiniteCheck, finite_check
from dsreason.train.common.preflight import DTYPES, build_encoder, check_upload, find_model
from dsreason.train.common.run_folder import open_output_dir
from dsreason.train.common.sampler import BUCKET_MB, Sampler, open_sampler

log = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


@dataclass(kw_only=True)
class OpenedRun(Generic[C]):
    """A run on one rank before its model is loaded."""

    config: C
    world: World
    output_dir: Path
    checkpoint: Path | None
    """To continue from."""
    model_path: Path
    encoder: Encoder
    deepspeed: dict[str, Any]
    training: SampleDataset
    validation: SampleDataset
    watchdog: Watchdog
    uploads: Uploads
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
    lock = stack.enter_context(FolderLock(on_lost=report_and_exit))
    uploads = stack.enter_context(uploading(config.checkpoint))  # left last: no rank waits for an upload
    stack.callback(shutdown)
    stop = stack.enter_context(StopRequest())
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
        training, validation = open_datasets(config.data)
    seed_everything(config.train.seed, world.rank)
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    deepspeed = resolve_deepspeed(config.deepspeed, config, device=device, world_size=world.size)
    if world.folder_ranks:  # with the stages 1 and 2 every host needs the weights
        deepspeed["checkpoint"] = {**deepspeed.get("checkpoint", {}), "use_node_local_storage": True}
    return OpenedRun(
        config=config,
        world=world,
        output_dir=output_dir,
        checkpoint=checkpoint,
        model_path=model_path,
        encoder=build_encoder(config, model_path),
        deepspeed=deepspeed,
        training=training,
        validation=validation,
        watchdog=watchdog,
        uploads=uploads,
        stop=stop,
    )


@dataclass(kw_only=True)
class Run(OpenedRun[C]):
    """The parts of a run on one rank; `state` says how far it is.

    A trainer's own run is this with more: `SFTRun(**vars(run), loader=loader)`.
    """

    engine: DeepSpeedEngine
    sampler: Sampler
    scorer: Scorer | None
    """None where there are no rewards."""
    metrics: Metrics
    progress: Progress
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
    def memory(self) -> MemoryLedger:
        return self.sampler.memory


def build_policy_engine(config: RunConfig, deepspeed_config: dict[str, Any], model_path: Path) -> DeepSpeedEngine:
    """The model in its partitions, frozen where asked, with its optimizer."""
    log.info("loading %s", model_path)
    model = load_model(
        model_path,
        dtype=DTYPES[config.train.precision],
        attention=config.model.attention,
        deepspeed=deepspeed_config,
        trust_remote_code=config.model.trust_remote_code,
    )
    if frozen := freeze(model, config.model.freeze):
        log.info("%d parameters are frozen by model.freeze", frozen)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return build_engine(Policy(model), config.optim, deepspeed_config)


def start_run(
    opened: OpenedRun[C],
    stack: ExitStack,
    *,
    engine: DeepSpeedEngine,
    settings: EngineSettings,
    state: TrainerState,
    total_steps: int,
    scorer: Scorer | None = None,
    bucket_mb: float = BUCKET_MB,
) -> Run[C]:
    """The run around the policy's `engine`: its record, rollout engine, rewards, curves and checkpoints, until `stack` closes.

    Curves go on after the step of `state` where the run is resumed. Every rank calls it.

    Args:
        settings: of the rollout engine.
    """
    config, output_dir, world = opened.config, opened.output_dir, opened.world
    facts = run_facts(world.size) | {"deepspeed": opened.deepspeed, "model_path": str(opened.model_path.resolve())}
    on_rank_zero(lambda: write_run_config(output_dir, config, facts))
    opened.uploads.add_not_uploaded(output_dir)
    metrics = open_metrics(
        output_dir,
        rank=world.rank,
        resume_step=state.step if opened.checkpoint is not None else None,
        config=config.monitor,
        run_config=dump_config(config),
    )
    metrics = stack.enter_context(metrics)
    with opened.watchdog.phase("start_engine"):
        rollout_engine = open_rollout_engine(
            opened.model_path,
            opened.encoder.processor.tokenizer,
            world,
            settings,
            dtype=DTYPES[config.train.precision],
            trust_remote_code=config.model.trust_remote_code,
        )
        sampler = open_sampler(engine, rollout_engine, opened.watchdog, stack, bucket_mb=bucket_mb)
    progress = open_progress(rank=world.rank, total_steps=total_steps, first_step=state.step)
    return Run(
        **vars(opened),
        engine=engine,
        sampler=sampler,
        scorer=None if scorer is None else stack.enter_context(scorer),
        metrics=metrics,
        progress=stack.enter_context(progress),
        writer=open_writer(opened, engine, stack),
        finite=finite_check(config, output_dir, world, state),
        total_steps=total_steps,
        state=state,
    )


def open_writer(opened: OpenedRun[C], engine: DeepSpeedEngine, stack: ExitStack) -> CheckpointWriter:
    """What saves checkpoints, until `stack` closes."""
    folder, background = opened.output_dir / "checkpoints", opened.config.checkpoint.background
    writer = CheckpointWriter(engine, folder, opened.world, background=background)
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
