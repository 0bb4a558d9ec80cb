"""Building an SFT run: model, engine, batches, and what shows the run to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dsreason.config.schema import SFTConfig
from dsreason.data.loader import StepLoader
from dsreason.job.ranks import World, gather_objects
from dsreason.models.load import model_config
from dsreason.rollout.batches import tokens_that_fit
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.train.common.arithmetic import Arithmetic, arithmetic_of
from dsreason.train.common.global_batches import step_order
from dsreason.train.common.opening import Run, build_policy_engine, open_run, start_policy, start_run
from dsreason.train.common.preflight import DTYPES
from dsreason.train.sft.preflight import check


@dataclass(kw_only=True)
class SFTRun(Run[SFTConfig]):
    """What SFT has beside the parts of every run."""

    loader: StepLoader
    arithmetic: Arithmetic
    steps_per_epoch: float


@contextmanager
def build_sft(config: SFTConfig, output_dir: Path | None, resume: str | None) -> Iterator[SFTRun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    with ExitStack() as stack:
        opened = open_run(config, output_dir, resume, command="sft", check=check, stack=stack)
        config, world, model_path, encoder = opened.config, opened.world, opened.model_path, opened.encoder
        order = step_order(opened.training, config)
        with opened.watchdog.phase("load_model"):
            engine = build_policy_engine(config, opened.deepspeed, model_path, world.group)
            state = start_policy(opened, engine)
        settings = TransformersSettings(
            attention=config.model.attention,
            batch_size=config.validation.micro_batch_size,
            batch_tokens=validation_tokens(config, model_path, world),
        )
        run = start_run(
            opened,
            stack,
            engine=engine,
            settings=settings,
            state=state,
            total_steps=order.num_steps,
        )
        loader = StepLoader(
            opened.training,
            encoder,
            order,
            config,
            rank=world.rank,
            world_size=world.size,
            ranks_per_row=world.ranks_per_row,
            exchange=gather_objects,
            start_step=state.step,
        )
        yield SFTRun(
            **vars(run),
            loader=loader,
            arithmetic=arithmetic_of(engine, world),
            steps_per_epoch=order.rows_per_epoch / config.train.global_batch_size,
        )


def validation_tokens(config: SFTConfig, model_path: Path, world: World) -> int:
    """Of a batch of held-out answers: what fits a quarter of the GPU, where the optimizer's state has made room."""
    if world.device.type != "cuda":
        return 0
    memory = torch.cuda.get_device_properties(world.device).total_memory // 4
    model = model_config(model_path, trust_remote_code=config.model.trust_remote_code)
    return tokens_that_fit(model, DTYPES[config.train.precision], memory)
