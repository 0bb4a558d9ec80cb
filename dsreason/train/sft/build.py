"""Building an SFT run: model, engine, batches, and what shows the run to a person."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.data.chat import Encoder
from dsreason.data.loader import StepLoader
from dsreason.models.freeze import freeze
from dsreason.models.load import enable_gradient_checkpointing, load_model, model_config
from dsreason.models.policy import Policy
from dsreason.rollout.batches import tokens_that_fit
from dsreason.rollout.transformers_engine import TransformersEngine
from dsreason.runtime.engine import build_engine
from dsreason.runtime.flops import ModelFlops, model_flops, peak_flops
from dsreason.runtime.memory import MemoryLedger
from dsreason.runtime.offload import StateOffload
from dsreason.runtime.progress import open_progress
from dsreason.runtime.world import World, broadcast_object, gather_objects
from dsreason.train.common.nonfinite import finite_check
from dsreason.train.common.opening import metrics_of, open_run, open_writer, record_run
from dsreason.train.common.preflight import DTYPES, build_encoder, check_sft, step_order
from dsreason.train.common.run import Run
from dsreason.train.common.run_folder import start_state
from dsreason.train.common.sampler import Sampler

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SFTRun(Run):
    config: SFTConfig
    scorer: None = None
    loader: StepLoader
    flops: ModelFlops
    peak_flops: float | None
    """Of all devices together; None where the device's peak is not known."""
    steps_per_epoch: float


@contextmanager
def build_sft(config: SFTConfig, output_dir: Path | None, resume: str | None) -> Iterator[SFTRun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    with ExitStack() as stack:
        run = open_run(config, output_dir, resume, command="sft", check=check_sft, stack=stack)
        config, world, model_path = run.config, run.world, run.model_path
        encoder = build_encoder(config, model_path)
        order = step_order(run.training, config)
        with run.watchdog.phase("load_model"):
            engine = build_policy_engine(config, run.deepspeed, model_path)
            state = start_state(engine, run.checkpoint, config, model_path, world)
        record_run(run)

        memory, offload = MemoryLedger(world.device), StateOffload(engine)
        log.info(offload.describe())
        metrics = stack.enter_context(metrics_of(run, state))
        progress = open_progress(rank=world.rank, total_steps=order.num_steps, first_step=state.step)
        stack.enter_context(progress)
        writer = open_writer(run, engine, stack)
        batch_tokens = validation_tokens(config, model_path, world)
        rollout = build_rollout(
            config, model_path, encoder, world, config.validation.micro_batch_size, batch_tokens=batch_tokens
        )
        yield SFTRun(
            config=config,
            world=world,
            output_dir=run.output_dir,
            model_path=model_path,
            engine=engine,
            encoder=encoder,
            loader=StepLoader(
                run.training,
                encoder,
                order,
                config,
                rank=world.rank,
                world_size=world.size,
                exchange=gather_objects,
                start_step=state.step,
            ),
            validation_data=run.validation,
            sampler=Sampler(rollout, engine, offload, memory, watch=run.watchdog.phase),
            metrics=metrics,
            progress=progress,
            memory=memory,
            watchdog=run.watchdog,
            writer=writer,
            uploads=run.uploads,
            stop=run.stop,
            finite=finite_check(config, run.output_dir, world, state),
            flops=model_flops(engine.module.model),
            peak_flops=broadcast_object(job_peak_flops(world)),  # one answer: counting FLOPs is a collective
            total_steps=order.num_steps,
            steps_per_epoch=order.rows_per_epoch / config.train.global_batch_size,
            state=state,
        )


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
    config: RunConfig, model_path: Path, encoder: Encoder, world: World, batch_size: int, batch_tokens: int = 0
) -> TransformersEngine:
    return TransformersEngine(
        model_path,
        encoder.processor.tokenizer,
        dtype=DTYPES[config.train.precision],
        device=world.device,
        attention=config.model.attention,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )


def validation_tokens(config: RunConfig, model_path: Path, world: World) -> int:
    """Of a batch of held-out answers: what fits a quarter of the GPU, where the optimizer's state has made room."""
    if world.device.type != "cuda":
        return 0
    memory = torch.cuda.get_device_properties(world.device).total_memory // 4
    model = model_config(model_path, trust_remote_code=config.model.trust_remote_code)
    return tokens_that_fit(model, DTYPES[config.train.precision], memory)


def job_peak_flops(world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    return None if peak is None else peak * world.size
