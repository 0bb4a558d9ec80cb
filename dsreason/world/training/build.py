"""Building a world-model run: data, components, engine, rewards, and what shows the run to a person."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import TrainerState, read_checkpoint
from dsreason.data.order import StepOrder
from dsreason.engine.average import WeightAverage
from dsreason.engine.engine import build_engine
from dsreason.engine.reference import ReferencePolicy, room_for_shares
from dsreason.errors import ConfigError
from dsreason.job.ranks import World, errors_on_all_ranks, first_rank_first
from dsreason.monitor.memory import MemoryLedger
from dsreason.train.common.digest import rows_digest
from dsreason.train.common.job import JobRun, OpenedJob, open_curves, open_job, start_job
from dsreason.train.common.preflight import DTYPES
from dsreason.train.common.run_folder import start_state
from dsreason.world.context_parallel import parallelise
from dsreason.world.data import WorldDataset
from dsreason.world.families import WorldFamily, family_of
from dsreason.world.families.cosmos_predict2_5 import PROJECTED
from dsreason.world.latents import LatentCodec
from dsreason.world.lora import add_lora, lora_metadata
from dsreason.world.models import load_transformer, load_vae
from dsreason.world.rewards import ClipScorer, open_scorer
from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import Share
from dsreason.world.training.export import export_file, write_export
from dsreason.world.training.inputs import Clip, Inputs, open_inputs, read_ahead, used_prompts
from dsreason.world.training.preflight import (
    check,
    clip_size,
    find_model,
    open_data,
    sigmas_of,
    step_order,
    total_steps,
)
from dsreason.world.types import ClipSize

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class WorldRun(JobRun[WorldConfig]):
    """What training of world models has beside the parts of every run."""

    training: WorldDataset
    validation: WorldDataset
    order: StepOrder
    family: WorldFamily
    codec: LatentCodec
    inputs: Inputs
    clips: Iterator[list[Clip]]
    """sft: this rank's clips of each step."""
    share: Share
    size: ClipSize
    shape: tuple[int, int, int, int]
    """Of a clip's latents, `(C, T, h, w)`."""
    sigmas: Tensor
    """`[sampling_steps + 1]`, float64, falling; the last one is 0."""
    scorer: ClipScorer | None
    """None on ranks that do not lead their share, and where there are no rewards, which only sft can do without."""
    reference: ReferencePolicy | None
    """None where no KL is asked for."""
    averages: Mapping[str, WeightAverage]
    """"ema" and, for nft, "old"."""
    lora: dict[str, Any] | None
    """The adapter's metadata; None where all weights are trained."""
    checked: bool = False
    """Whether sampling and training have been found to be one function in this process."""
    eps_told: bool = False
    """Whether a gradient near Adam's epsilon has been warned of."""
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest rollout."""

    @property
    def export_file(self) -> str:
        return export_file(self.lora)

    @property
    def device(self) -> torch.device:
        return self.world.device

    def write_export(self, output: Path, dtype: Literal["bf16", "fp32"]) -> None:
        """A folder for diffusers, of the averaged weights where there are any."""
        write_export(
            self.engine,
            self.averages.get("ema"),
            self.model_path,
            output,
            self.world,
            lora=self.lora,
            dtype=dtype,
            max_shard_size=self.config.checkpoint.max_shard_size,
            run=self.output_dir,
            step=self.state.step,
        )


def check_start(config: WorldConfig, step: int) -> None:
    """ConfigError where a run would go on inside of a rollout."""
    steps = config.world.optimizer_steps_per_rollout
    if config.world.algorithm != "sft" and step % steps:
        raise ConfigError(
            f"world.optimizer_steps_per_rollout ({steps}): the checkpoint is of step {step}, which is inside of a rollout; "
            "take the number that the run began with"
        )


@contextmanager
def build_world(config: WorldConfig, output_dir: Path | None, resume: str | None) -> Iterator[WorldRun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    with ExitStack() as stack:
        opened = open_job(config, output_dir, resume, command="world", check=check, find_model=find_model, stack=stack)
        config, world, folder = opened.config, opened.world, opened.model_path
        with opened.watchdog.phase("open_data"), first_rank_first(world):
            training, validation = open_data(config)
        order, share, size = step_order(config, len(training)), share_of(config, world), clip_size(config.data)
        with opened.watchdog.phase("load_model"):
            codec = load_vae(folder, world.device, DTYPES[config.train.precision])
            shape = codec.shape(size)
            prompts = used_prompts(config, (training, validation), order)
            inputs = open_inputs(config, folder, prompts, codec, world)
            engine, lora = build_transformer(opened)
            state, reference, averages = start_weights(engine, opened, with_frozen=lora is None)
        metrics = open_curves(opened, state, stack, training=training, validation=validation, digest=digest_of)
        started = start_job(
            opened,
            stack,
            engine=engine,
            metrics=metrics,
            memory=MemoryLedger(world.device),
            state=state,
            total_steps=total_steps(config, order),
            averages=averages,
            with_frozen=lora is None,
        )
        yield WorldRun(
            **vars(started),
            training=training,
            validation=validation,
            order=order,
            family=family_of(folder),
            codec=codec,
            inputs=inputs,
            clips=read_ahead(config, training, order, share, state.step),
            share=share,
            size=size,
            shape=shape,
            sigmas=sigmas_of(config, folder),
            scorer=open_rewards(config, share, stack),
            reference=reference,
            averages=averages,
            lora=lora,
        )


def digest_of(rows: WorldDataset) -> dict[str, Any]:
    """Of prompts and the names of clips, see `rows_digest`."""
    return rows_digest(len(rows), lambda number: [rows[number].prompt, PurePath(rows[number].clip or "").name])


def share_of(config: WorldConfig, world: World) -> Share:
    size = config.train.context_parallel_size
    return Share(world.rank // size, world.size // size, leads=world.rank % size == 0)


def open_rewards(config: WorldConfig, share: Share, stack: ExitStack) -> ClipScorer | None:
    """On the ranks that ask for rewards: one of those that compute a clip together. Collective."""
    with errors_on_all_ranks():
        if share.leads and (config.reward.functions or config.reward.services):
            return stack.enter_context(open_scorer(config.reward))
    return None


def build_transformer(opened: OpenedJob[WorldConfig]) -> tuple[DeepSpeedEngine, dict[str, Any] | None]:
    """The transformer in its partitions, with its optimizer; and the adapter's metadata where only that is trained."""
    config, folder = opened.config, opened.model_path
    family, metadata = family_of(folder), None
    log.info("loading %s", folder)
    transformer = load_transformer(folder, DTYPES[config.train.precision], opened.deepspeed, opened.world.device)
    if config.model.freeze_text_projection:
        transformer.get_submodule(PROJECTED).requires_grad_(False)
    if config.lora.rank:
        targets = config.lora.targets or family.lora_targets
        add_lora(transformer, rank=config.lora.rank, alpha=config.lora.scale, targets=targets, seed=config.train.seed)
        metadata = lora_metadata(transformer)
    if config.model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if (group := context_group(config, opened.world)) is not None:
        parallelise(transformer, family, group)
    return build_engine(transformer, config.optim, opened.deepspeed, family.blocks), metadata


def context_group(config: WorldConfig, world: World) -> Any:
    """The process group of the ranks that share this rank's clips; None where each has its own. Collective."""
    size = config.train.context_parallel_size
    if size == 1:
        return None
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world.size, size)]
    return groups[world.rank // size]


def start_weights(
    engine: DeepSpeedEngine, opened: OpenedJob[WorldConfig], *, with_frozen: bool
) -> tuple[TrainerState, ReferencePolicy | None, dict[str, WeightAverage]]:
    """Where the run starts, the reference where there is a KL, and the averages of the weights, as the checkpoint has them."""
    config, checkpoint = opened.config, opened.checkpoint
    with_kl = config.world.kl_coef > 0 and config.world.algorithm != "sft"
    wanted = {"ema": config.train.ema_decay is not None, "old": config.world.algorithm == "nft"}
    # The policy's place while others are in the engine, one at a time: for 14B it is 28 GB a host.
    room = room_for_shares(engine) if with_kl or any(wanted.values()) else None
    # Before a checkpoint is loaded: it is the model that training began with.
    reference = ReferencePolicy(engine, room) if with_kl else None
    state = start_state(engine, checkpoint, config, opened.model_path, opened.world, with_frozen=with_frozen)
    check_start(config, state.step)
    averages = {name: WeightAverage(engine, room) for name in wanted if wanted[name]}
    if checkpoint is not None:
        for name, average in averages.items():
            average.load(checkpoint, name, read_checkpoint(checkpoint).world_size)
    return state, reference, averages
