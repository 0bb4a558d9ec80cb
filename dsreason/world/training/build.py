"""Setup of a world-model run: data, components, engine, rewards, metrics and progress display."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from dsreason.checkpoints.checkpoint_folder import TrainerState, read_checkpoint
from dsreason.data.order import StepOrder
from dsreason.engine.average import WeightAverage
from dsreason.engine.engine import build_engine
from dsreason.engine.learning_rates import describe_learning_rates
from dsreason.engine.reference import ReferencePolicy, allocate_share_buffer
from dsreason.errors import ConfigError
from dsreason.job.ranks import World, run_first_rank_first, share_errors
from dsreason.monitor.memory import MemoryLedger
from dsreason.monitor.metrics import Metrics
from dsreason.train.common.digest import compute_rows_digest
from dsreason.train.common.job import TrainingJob, open_curves, open_job
from dsreason.train.common.preflight import DTYPES
from dsreason.train.common.run import TrainingRun, start_run
from dsreason.train.common.run_folder import start_state
from dsreason.world.context_parallel import share_tokens
from dsreason.world.data import WorldDataset
from dsreason.world.families import find_family
from dsreason.world.lora import build_lora_metadata
from dsreason.world.models import load_transformer, load_vae
from dsreason.world.rewards.scorer import ClipScorer, open_scorer
from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import ClipShare
from dsreason.world.training.export import export_file, write_export
from dsreason.world.training.gradients import EpsilonCheck
from dsreason.world.training.inputs import Clip, list_prompts, open_inputs, read_ahead
from dsreason.world.training.preflight import (
    build_step_order,
    check,
    find_model,
    has_different_rates,
    open_data,
    select_trained,
    total_steps,
)
from dsreason.world.training.update import RatioCheck
from dsreason.world.training.validate import WorldResult, validate
from dsreason.world.training.velocity import ClipMaker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunWeights:
    """The engine that wraps the transformer, the run's other weights, and the trainer state."""

    engine: DeepSpeedEngine
    lora: dict[str, Any] | None
    """The adapter's metadata; None if all weights are trained."""
    state: TrainerState
    reference: ReferencePolicy | None
    """The reference for the KL term; None if there is no such term."""
    averages: Mapping[str, WeightAverage]
    """Averages by name: "ema" if `train.ema_decay` is set, and "old" for nft."""


@dataclass(kw_only=True)
class WorldTrainer:
    """The components of a training run."""

    job: TrainingJob[WorldConfig]
    run: TrainingRun[WorldConfig]
    clip_maker: ClipMaker
    training: WorldDataset
    validation: WorldDataset
    order: StepOrder
    clips: Iterator[list[Clip]]
    """This rank's real clips, one list per step; used only by sft."""
    reference: ReferencePolicy | None
    """The reference for the KL term; None if there is no such term."""
    averages: Mapping[str, WeightAverage]
    """Averages by name: "ema" if `train.ema_decay` is set, and "old" for nft."""
    lora: dict[str, Any] | None
    """The adapter's metadata; None if all weights are trained."""
    epsilon_check: EpsilonCheck
    ratio_check: RatioCheck = field(default_factory=RatioCheck)

    def validate(self, step: int) -> WorldResult | None:
        datasets, average = (self.training, self.validation), self.averages.get("ema")
        return validate(self.clip_maker, datasets, average, self.run.progress)


def check_start(config: WorldConfig, step: int) -> None:
    """Raise ConfigError if the run would resume in the middle of a rollout."""
    steps = config.world.optimizer_steps_per_rollout
    if config.world.algorithm != "sft" and step % steps:
        raise ConfigError(
            f"world.optimizer_steps_per_rollout ({steps}): the checkpoint is from step {step}, which is in the middle of a "
            "rollout; use the value with which the run was started"
        )


@contextmanager
def build_world(config: WorldConfig, output_dir: Path | None, resume: str | None) -> Iterator[WorldTrainer]:
    """Join the job, check the configuration and build the trainer; close it at the end. Every rank must call this."""
    with ExitStack() as stack:
        job = open_job(config, output_dir, resume, command="world", check=check, find_model=find_model, stack=stack)
        config, world, folder = job.config, job.world, job.model_path
        with job.watchdog.track_phase("open_data"), run_first_rank_first(world):
            training, validation = open_data(config)
        order, share = build_step_order(config, len(training)), compute_share(config, world)
        with job.watchdog.track_phase("load_model"):
            codec = load_vae(folder, world.device, DTYPES[config.train.precision])
            prompts = list_prompts(config, (training, validation), order)
            inputs = open_inputs(config, folder, prompts, codec, world)
            weights = load_weights(job)
        metrics = open_curves(job, weights.state, stack, training=training, validation=validation, digest=digest_rows)
        run = start_world_run(job, weights, stack, metrics=metrics, total_steps=total_steps(config, order))
        clips = read_ahead(config, training, order, share, weights.state.step)
        clip_maker = ClipMaker(
            config=config,
            family=find_family(folder),
            model_path=folder,
            transformer=weights.engine,
            codec=codec,
            inputs=inputs,
            share=share,
            scorer=open_group_scorer(config, share, stack),
            device=world.device,
        )
        yield WorldTrainer(
            job=job,
            run=run,
            clip_maker=clip_maker,
            training=training,
            validation=validation,
            order=order,
            clips=clips,
            reference=weights.reference,
            averages=weights.averages,
            lora=weights.lora,
            epsilon_check=EpsilonCheck(config.optim),
        )


def start_world_run(
    job: TrainingJob[WorldConfig], weights: RunWeights, stack: ExitStack, *, metrics: Metrics, total_steps: int
) -> TrainingRun[WorldConfig]:
    """Start the run; its exports contain the moving average of the weights if there is one. Every rank must call this."""
    config, lora = job.config, weights.lora

    def export(output: Path, dtype: Literal["bf16", "fp32"], state: TrainerState) -> None:
        write_export(
            weights.engine,
            weights.averages.get("ema"),
            job.model_path,
            output,
            job.world,
            lora=lora,
            dtype=dtype,
            max_shard_size=config.checkpoint.max_shard_size,
            run=job.output_dir,
            step=state.step,
        )

    return start_run(
        job,
        stack,
        engine=weights.engine,
        metrics=metrics,
        memory=MemoryLedger(job.world.device),
        state=weights.state,
        total_steps=total_steps,
        write_export=export,
        export_file=export_file(lora),
        averages=weights.averages,
        with_frozen=lora is None,
    )


def digest_rows(rows: WorldDataset) -> dict[str, Any]:
    """Compute a digest of the rows' prompts and clip file names; see `compute_rows_digest`."""
    return compute_rows_digest(len(rows), lambda number: [rows[number].prompt, PurePath(rows[number].clip or "").name])


def compute_share(config: WorldConfig, world: World) -> ClipShare:
    """Return this rank's share of the clips."""
    size = config.train.context_parallel_size
    return ClipShare(world.rank // size, world.size // size, leads=world.rank % size == 0)


def open_group_scorer(config: WorldConfig, share: ClipShare, stack: ExitStack) -> ClipScorer | None:
    """Open the scorer on the leading rank of each context-parallel group, until `stack` closes. Collective.

    Returns:
        The scorer; None on other ranks or if no rewards are configured.
    """
    with share_errors():
        if share.leads and (config.reward.functions or config.reward.services):
            return stack.enter_context(open_scorer(config.reward))
    return None


def build_transformer(job: TrainingJob[WorldConfig]) -> tuple[DeepSpeedEngine, dict[str, Any] | None]:
    """Build the DeepSpeed engine with the transformer and its optimizer.

    Returns:
        The engine, and the adapter's metadata (None if all weights are trained).
    """
    config, folder = job.config, job.model_path
    family, metadata = find_family(folder), None
    log.info("loading %s", folder)
    transformer = load_transformer(folder, DTYPES[config.train.precision], job.deepspeed, job.world.device)
    select_trained(transformer, config, family)
    if config.lora.rank:
        metadata = build_lora_metadata(transformer)
    if has_different_rates(config):
        log.info("learning rates by module:\n%s", describe_learning_rates(transformer, config.optim))
    if config.model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if (group := build_context_group(config, job.world)) is not None:
        share_tokens(transformer, family, group)
    return build_engine(transformer, config.optim, job.deepspeed, family.blocks), metadata


def build_context_group(config: WorldConfig, world: World) -> Any:
    """Create the process groups whose ranks share clips. Collective.

    Returns:
        This rank's group; None if context parallelism is off.
    """
    size = config.train.context_parallel_size
    if size == 1:
        return None
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)]
    return groups[world.rank // size]


def load_weights(job: TrainingJob[WorldConfig]) -> RunWeights:
    """Build the engine, load the checkpoint to resume from, and build the reference and the averages that the run needs."""
    config, checkpoint = job.config, job.checkpoint
    engine, lora = build_transformer(job)
    with_kl = config.world.kl_coef > 0 and config.world.algorithm != "sft"
    needed = {"ema": config.train.ema_decay is not None, "old": config.world.algorithm == "nft"}
    # While the engine holds other weights, this buffer holds the policy: 28 GB per host for a 14B model.
    policy_buffer = allocate_share_buffer(engine) if with_kl or any(needed.values()) else None
    # The reference is the initial model, so it must be built before a checkpoint is loaded.
    reference = ReferencePolicy(engine, policy_buffer) if with_kl else None
    state = start_state(engine, checkpoint, config, job.model_path, job.world, with_frozen=lora is None)
    check_start(config, state.step)
    averages = {name: WeightAverage(engine, policy_buffer) for name in needed if needed[name]}
    if checkpoint is not None:
        for name, average in averages.items():
            average.load(checkpoint, name, read_checkpoint(checkpoint).world_size)
    return RunWeights(engine, lora, state, reference, averages)
