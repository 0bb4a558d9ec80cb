"""Building an SFT run: folder, data, model, engine, and what shows the run to a person."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.lock import FolderLock
from dsreason.config.output import default_output_dir, write_run_config
from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.data.chat import Encoder
from dsreason.data.loader import StepLoader
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.models.freeze import freeze
from dsreason.models.load import enable_gradient_checkpointing, load_model
from dsreason.models.policy import Policy
from dsreason.rollout.transformers_engine import TransformersEngine
from dsreason.runtime.checkpoint import TrainerState
from dsreason.runtime.checkpoint_writer import CheckpointWriter
from dsreason.runtime.engine import build_engine
from dsreason.runtime.flops import ModelFlops, model_flops, peak_flops
from dsreason.runtime.logs import setup_logs
from dsreason.runtime.memory import MemoryLedger
from dsreason.runtime.metrics import Metrics, open_metrics
from dsreason.runtime.offload import StateOffload
from dsreason.runtime.progress import Progress, open_progress
from dsreason.runtime.record import run_facts
from dsreason.runtime.stop import StopRequest
from dsreason.runtime.uploads import Uploader, uploading
from dsreason.runtime.watchdog import Watchdog, cut_short
from dsreason.runtime.world import (
    World,
    broadcast_object,
    first_rank_first,
    gather_objects,
    init_world,
    on_rank_zero,
    seed_everything,
    shutdown,
)
from dsreason.train.nonfinite import FiniteCheck, finite_check
from dsreason.train.preflight import DTYPES, build_encoder, check_sft, check_upload, find_model, step_order
from dsreason.train.run_folder import open_output_dir, start_state
from dsreason.train.sampler import Sampler

log = logging.getLogger(__name__)


@dataclass
class SFTRun:
    """The parts of a run on one rank; `state` says how far it is."""

    config: SFTConfig
    world: World
    output_dir: Path
    model_path: Path
    engine: DeepSpeedEngine
    encoder: Encoder
    loader: StepLoader
    validation_data: SampleDataset
    sampler: Sampler
    metrics: Metrics
    progress: Progress
    memory: MemoryLedger
    watchdog: Watchdog
    writer: CheckpointWriter
    uploads: Uploader
    stop: StopRequest
    finite: FiniteCheck
    flops: ModelFlops
    peak_flops: float | None
    """Of all devices together; None where the device's peak is not known."""
    total_steps: int
    steps_per_epoch: float
    state: TrainerState
    num_skipped: int = 0
    """Uses of rows that were left out since this process started."""
    named_skipped: set[str] = field(default_factory=set)
    scorer: None = None
    """There are no rewards; as `GRPORun` has it for validation."""

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"


@contextmanager
def build_sft(config: SFTConfig, output_dir: Path | None, resume: str | None) -> Iterator[SFTRun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    world = init_world()
    with ExitStack() as stack:
        lock = stack.enter_context(FolderLock(on_lost=cut_short))
        uploads = stack.enter_context(uploading(config.checkpoint))  # left last: no rank waits for an upload
        stack.callback(shutdown)
        stop = stack.enter_context(StopRequest())
        output_dir = broadcast_object(output_dir or default_output_dir("sft"))
        config = config.model_copy(update={"output_dir": str(output_dir)})
        world, checkpoint = open_output_dir(output_dir, config, resume, lock, world)
        setup_logs(output_dir, world.rank)
        watchdog = stack.enter_context(watch(config, world))
        with watchdog.phase("preflight"):
            on_rank_zero(lambda: check_sft(config))
            on_rank_zero(lambda: check_upload(config, checkpoint, create=True))
        with watchdog.phase("open_data"), first_rank_first(world):
            model_path = find_model(config)
            training, validation = open_datasets(config.data)

        deepspeed_config = deepspeed_of(config, world)
        seed_everything(config.train.seed, world.rank)
        encoder = build_encoder(config, model_path)
        order = step_order(training, config)
        with watchdog.phase("load_model"):
            engine = build_policy_engine(config, deepspeed_config, model_path)
            state = start_state(engine, checkpoint, config, model_path, world)
        facts = run_facts(world.size) | {"deepspeed": deepspeed_config, "model_path": str(model_path.resolve())}
        on_rank_zero(lambda: write_run_config(output_dir, config, facts))
        uploads.add_left(output_dir)

        progress = open_progress(rank=world.rank, total_steps=order.num_steps, first_step=state.step)
        metrics = open_metrics(
            output_dir,
            rank=world.rank,
            resume_step=state.step if checkpoint is not None else None,
            config=config.monitor,
            run_config=dump_config(config),
        )
        memory, offload = MemoryLedger(world.device), StateOffload(engine)
        log.info(offload.describe())
        stack.enter_context(metrics)
        stack.enter_context(progress)
        writer = open_writer(engine, config, output_dir / "checkpoints", world, watchdog, stack)
        rollout = build_rollout(config, model_path, encoder, world, config.validation.micro_batch_size)
        yield SFTRun(
            config=config,
            world=world,
            output_dir=output_dir,
            model_path=model_path,
            engine=engine,
            encoder=encoder,
            loader=StepLoader(
                training,
                encoder,
                order,
                config,
                rank=world.rank,
                world_size=world.size,
                exchange=gather_objects,
                start_step=state.step,
            ),
            validation_data=validation,
            sampler=Sampler(rollout, engine, offload, memory, watch=watchdog.phase),
            metrics=metrics,
            progress=progress,
            memory=memory,
            watchdog=watchdog,
            writer=writer,
            uploads=uploads,
            stop=stop,
            finite=finite_check(config, output_dir, world, state),
            flops=model_flops(engine.module.model),
            peak_flops=broadcast_object(job_peak_flops(world)),  # one answer: counting FLOPs is a collective
            total_steps=order.num_steps,
            steps_per_epoch=order.rows_per_epoch / config.train.global_batch_size,
            state=state,
        )


def watch(config: RunConfig, world: World) -> Watchdog:
    monitor = config.monitor
    return Watchdog(world, time_limit=monitor.phase_time_limit, time_limits=monitor.phase_time_limits)


def open_writer(
    engine: DeepSpeedEngine, config: RunConfig, folder: Path, world: World, watchdog: Watchdog, stack: ExitStack
) -> CheckpointWriter:
    """What saves checkpoints, until `stack` closes. Call it when everything else is open."""
    writer = CheckpointWriter(engine, folder, world, background=config.checkpoint.background)
    stack.callback(writer.close)
    stack.push(watchdog.close_in_time)

    def make_up(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            with watchdog.phase("checkpoint"):
                writer.make_up()

    stack.push(make_up)
    return writer


def deepspeed_of(config: RunConfig, world: World) -> dict[str, Any]:
    resolved = resolve_deepspeed(config.deepspeed, config, device=world.device.type, world_size=world.size)
    if world.folder_ranks:  # with the stages 1 and 2 every host needs the weights
        resolved["checkpoint"] = {**resolved.get("checkpoint", {}), "use_node_local_storage": True}
    return resolved


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
    frozen = freeze(model, config.model.freeze)
    if frozen:
        log.info("%d parameters are frozen by model.freeze", frozen)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return build_engine(Policy(model), config.optim, deepspeed_config)


def build_rollout(
    config: RunConfig, model_path: Path, encoder: Encoder, world: World, batch_size: int
) -> TransformersEngine:
    return TransformersEngine(
        model_path,
        encoder.processor.tokenizer,
        dtype=DTYPES[config.train.precision],
        device=world.device,
        attention=config.model.attention,
        batch_size=batch_size,
        trust_remote_code=config.model.trust_remote_code,
    )


def job_peak_flops(world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    return None if peak is None else peak * world.size
