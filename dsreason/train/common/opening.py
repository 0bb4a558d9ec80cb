"""Setup of a vision-language run: its data, its policy engine and its sampler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from dsreason.checkpoints.checkpoint_folder import SavedAdapter, TrainerState
from dsreason.checkpoints.export import export_engine
from dsreason.checkpoints.model_card import is_hub_name
from dsreason.checkpoints.trained_vision import collect_trained_vision
from dsreason.config.schema import RunConfig
from dsreason.config.schema_grpo import OffloadMode
from dsreason.data.chat import Encoder
from dsreason.data.micro_batches import describe_forward_size
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.engine.engine import build_engine
from dsreason.engine.learning_rates import describe_learning_rates
from dsreason.families import get_family
from dsreason.job.ranks import build_row_groups, run_first_rank_first, run_on_rank_zero, share_errors
from dsreason.models.folder import compute_fingerprint
from dsreason.models.freeze import freeze
from dsreason.models.load import load_model
from dsreason.models.lora import (
    add_adapters,
    check_alike,
    describe_trained_share,
    get_adapter_scales,
    get_adapter_settings,
)
from dsreason.models.policy import Policy, enable_gradient_checkpointing
from dsreason.rollout.opening import EngineSettings, open_rollout_engine
from dsreason.rollout.vllm_arguments import VLLMSettings
from dsreason.train.common.digest import compute_samples_digest
from dsreason.train.common.job import TrainingJob, open_curves, open_job
from dsreason.train.common.page import RunPage
from dsreason.train.common.preflight import DTYPES, build_encoder, find_model, has_different_rates
from dsreason.train.common.run import TrainingRun, start_run
from dsreason.train.common.run_folder import start_state
from dsreason.train.common.sampler import BUCKET_MB, Sampler, open_sampler

log = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class TrainingRows:
    """The training and held-out rows of a run, and their encoder."""

    encoder: Encoder
    training: SampleDataset
    validation: SampleDataset


def open_policy_job(
    config: C,
    output_dir: Path | None,
    resume: str | None,
    *,
    command: str,
    check: Callable[[C], object],
    stack: ExitStack,
) -> tuple[TrainingJob[C], TrainingRows]:
    """Join the job, and open the data and everything else that does not need the model. Collective; `stack` closes it all.

    Args:
        output_dir: the run folder; if None, the ranks agree on a new folder named after `command`.
        resume: checkpoint to continue from, `auto` for the newest, or None for a new run.
        check: checks data and model; called on rank 0 if a launcher other than dsreason started the ranks.
    """
    job = open_job(config, output_dir, resume, command=command, check=check, find_model=find_model, stack=stack)
    job.world = build_row_groups(job.world, config.train.sequence_parallel_size)
    with job.watchdog.track_phase("open_data"), run_first_rank_first(job.world):
        training, validation = open_datasets(job.config.data)
    return job, TrainingRows(build_encoder(job.config, job.model_path), training, validation)


def build_policy_engine(
    config: RunConfig, deepspeed_config: dict[str, Any], model_path: Path, group: Any = None
) -> DeepSpeedEngine:
    """Load the model, freeze parameters and add adapters as configured, and build the DeepSpeed engine.

    Args:
        group: process group of the ranks that compute rows together (`World.group`); None if each rank computes its own.
    """
    log.info("loading %s", model_path)
    model = load_model(
        model_path,
        dtype=DTYPES[config.train.precision],
        attention=config.model.attention,
        deepspeed=deepspeed_config,
        quantize=config.model.quantize,
        fused_kernels=config.model.fused_kernels and get_accelerator().device_name() == "cuda",
        trust_remote_code=config.model.trust_remote_code,
    )
    log.info("a forward pass takes %s", describe_forward_size(config))
    freeze(model, config.model.freeze)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model, offload=config.train.activation_offload)
    # The policy must be built before the adapters are added, because it needs the plain output layer.
    policy = Policy(model, group, config.train.router_loss_weight)
    if config.lora.rank:
        add_adapters(model, config.lora, seed=config.train.seed)
        check_alike(model)
        log.info("%s", describe_trained_share(model))
    if has_different_rates(config):
        log.info("learning rates by module:\n%s", describe_learning_rates(model, config.optim))
    blocks = get_family(model.config.model_type).modules.blocks
    return build_engine(policy, config.optim, deepspeed_config, blocks)


def start_policy(job: TrainingJob[C], engine: DeepSpeedEngine) -> TrainerState:
    """Load the checkpoint to continue from, if any, and return the state that the run starts with; see `start_state`."""
    config, model_path = job.config, job.model_path
    adapter = describe_adapter(engine, config, model_path) if config.lora.rank else None
    state = start_state(
        engine, job.checkpoint, config, model_path, job.world, with_frozen=adapter is None, adapter=adapter
    )
    state = replace(state, template_arguments=config.data.template_arguments)
    if get_family(engine.module.model.config.model_type).vision is None:
        return state
    sources = [(source.path or source.adapter, source.vision) for source in config.data.list_sources()]
    return replace(state, vision=collect_trained_vision(sources))


def describe_adapter(engine: DeepSpeedEngine, config: RunConfig, model_path: Path) -> SavedAdapter:
    """Return the description of the trained adapters that is stored in checkpoints. Collective."""
    base, revision, model = config.model.path, config.model.revision, engine.module.model
    names = {"base_model_name_or_path": base if is_hub_name(base) else str(model_path.resolve()), "revision": revision}
    return SavedAdapter(
        base=base,
        revision=revision,
        fingerprint=run_on_rank_zero(lambda: compute_fingerprint(model_path)),
        quantize=config.model.quantize,
        settings=get_adapter_settings(model) | names,
        scales=get_adapter_scales(model),
    )


def start_policy_run(
    job: TrainingJob[C],
    rows: TrainingRows,
    stack: ExitStack,
    *,
    engine: DeepSpeedEngine,
    settings: EngineSettings,
    state: TrainerState,
    total_steps: int,
    scorer: AbstractContextManager[object] | None = None,
    bucket_mb: float = BUCKET_MB,
    offload: OffloadMode = "always",
) -> tuple[TrainingRun[C], Sampler]:
    """Open a run's record, curves, rollout engine and checkpoints; `stack` closes them. Collective.

    The curves of a resumed run continue after the step of `state`.

    Args:
        engine: the policy's engine.
        settings: settings for the rollout engine.
        state: state that the run starts with.
        scorer: opened after the rollout engine, which must reserve its share of the GPU first.
        bucket_mb: maximum MiB of weights that a weight sync gathers at a time.
        offload: whether the optimizer's state leaves the GPU during rollouts.
    """
    config, world = job.config, job.world
    metrics = open_curves(
        job, state, stack, training=rows.training, validation=rows.validation, digest=compute_samples_digest
    )
    sampler = start_sampler(job, rows, stack, engine, settings, bucket_mb, offload)
    if scorer is not None:
        with share_errors():
            stack.enter_context(scorer)

    def write_export(output: Path, dtype: Literal["bf16", "fp32"], current: TrainerState) -> None:
        export_engine(
            engine,
            job.model_path,
            output,
            world,
            dtype=dtype,
            max_shard_size=config.checkpoint.max_shard_size,
            run=job.output_dir,
            step=current.step,
            adapter=current.adapter,
            vision=current.vision,
            template_arguments=current.template_arguments,
            trust_remote_code=config.model.trust_remote_code,
        )

    run = start_run(
        job,
        stack,
        engine=engine,
        metrics=metrics,
        memory=sampler.memory,
        state=state,
        total_steps=total_steps,
        write_export=write_export,
        with_frozen=config.lora.rank == 0,
        page=RunPage(job.output_dir) if world.is_main else None,
    )
    return run, sampler


def start_sampler(
    job: TrainingJob[C],
    rows: TrainingRows,
    stack: ExitStack,
    engine: DeepSpeedEngine,
    settings: EngineSettings,
    bucket_mb: float,
    offload: OffloadMode,
) -> Sampler:
    """Start the rollout engine on the same devices as the policy's `engine`; it runs until `stack` closes. Collective."""
    config = job.config
    with job.watchdog.track_phase("start_engine"):
        rollout_engine = open_rollout_engine(
            job.model_path,
            rows.encoder.processor.tokenizer,
            job.world,
            settings,
            dtype=DTYPES[config.train.precision],
            trust_remote_code=config.model.trust_remote_code,
        )
        share = settings.gpu_memory_utilization if isinstance(settings, VLLMSettings) else None
        return open_sampler(
            engine, rollout_engine, job.watchdog, stack, bucket_mb=bucket_mb, mode=offload, vllm_share=share
        )
