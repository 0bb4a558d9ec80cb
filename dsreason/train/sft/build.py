"""Setup of an SFT run: model, engine, batches, metrics and progress display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine

from dsreason.config.schema import SFTConfig
from dsreason.data.loader import StepLoader
from dsreason.job.ranks import World, gather_objects
from dsreason.models.load import read_model_config
from dsreason.rollout.batches import count_tokens_that_fit
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.train.common.answers import ValidationResult
from dsreason.train.common.global_batches import build_step_order
from dsreason.train.common.job import TrainingJob
from dsreason.train.common.opening import build_policy_engine, open_policy_job, start_policy, start_policy_run
from dsreason.train.common.preflight import DTYPES
from dsreason.train.common.run import TrainingRun
from dsreason.train.common.sampler import Sampler
from dsreason.train.common.utilisation import UtilisationMeter, build_utilisation_meter
from dsreason.train.common.validate import HeldOut, validate
from dsreason.train.sft.preflight import check


@dataclass(kw_only=True)
class SFTTrainer:
    """The components of an SFT run."""

    job: TrainingJob[SFTConfig]
    run: TrainingRun[SFTConfig]
    world: World
    engine: DeepSpeedEngine
    sampler: Sampler
    """Sampler that generates answers to the held-out prompts."""
    held_out: HeldOut[SFTConfig]
    loader: StepLoader
    utilisation: UtilisationMeter
    steps_per_epoch: float

    def validate(self, step: int) -> ValidationResult | None:
        return validate(self.sampler, self.held_out, version=step, progress=self.run.progress)


@contextmanager
def build_sft(config: SFTConfig, output_dir: Path | None, resume: str | None) -> Iterator[SFTTrainer]:
    """Join the job, check the config and build the trainer; release its resources on exit. Collective."""
    with ExitStack() as stack:
        job, rows = open_policy_job(config, output_dir, resume, command="sft", check=check, stack=stack)
        config, world, model_path = job.config, job.world, job.model_path
        order = build_step_order(rows.training, config)
        with job.watchdog.track_phase("load_model"):
            engine = build_policy_engine(config, job.deepspeed, model_path, world.group)
            state = start_policy(job, engine)
        settings = TransformersSettings(
            attention=config.model.attention,
            batch_size=config.validation.micro_batch_size,
            batch_tokens=compute_validation_tokens(config, model_path, world),
        )
        run, sampler = start_policy_run(
            job, rows, stack, engine=engine, settings=settings, state=state, total_steps=order.num_steps
        )
        loader = StepLoader(
            rows.training,
            rows.encoder,
            order,
            config,
            rank=world.rank,
            world_size=world.size,
            ranks_per_row=world.ranks_per_row,
            exchange=gather_objects,
            start_step=state.step,
        )
        yield SFTTrainer(
            job=job,
            run=run,
            world=world,
            engine=engine,
            sampler=sampler,
            held_out=HeldOut(rows.validation, rows.encoder, config, world),
            loader=loader,
            utilisation=build_utilisation_meter(engine, world),
            steps_per_epoch=order.rows_per_epoch / config.train.global_batch_size,
        )


def compute_validation_tokens(config: SFTConfig, model_path: Path, world: World) -> int:
    """Return the token budget for a validation batch.

    The budget is the number of tokens that fit into a quarter of the GPU's memory. On a CPU, it is 0, which means unset.
    """
    if world.device.type != "cuda":
        return 0
    memory = torch.cuda.get_device_properties(world.device).total_memory // 4
    model = read_model_config(model_path, trust_remote_code=config.model.trust_remote_code)
    return count_tokens_that_fit(model, DTYPES[config.train.precision], memory)
