"""Building a GRPO run: prompts, model, engine, sampler, rewards, and what shows the run to a person."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.prompts import PromptLoader, Prompts
from dsreason.data.sources import SampleDataset
from dsreason.errors import ConfigError
from dsreason.losses.objective import Objective, objective_of
from dsreason.rewards.scoring import Scorer, open_scorer
from dsreason.rollout.protocol import RolloutEngine, media_token_ids
from dsreason.runtime.checkpoint import TrainerState
from dsreason.runtime.memory import MemoryLedger
from dsreason.runtime.offload import StateOffload
from dsreason.runtime.progress import open_progress
from dsreason.runtime.reference import ReferencePolicy
from dsreason.runtime.watchdog import Watchdog
from dsreason.runtime.world import World, gather_objects
from dsreason.train.build import build_policy_engine, build_rollout
from dsreason.train.check_rewards import row_check
from dsreason.train.nonfinite import finite_check
from dsreason.train.opening import OpenedRun, metrics_of, open_run, open_writer, record_run
from dsreason.train.preflight import (
    DTYPES,
    build_encoder,
    check_grpo,
    prompt_encoder,
    rollout_order,
)
from dsreason.train.reference import load_reference
from dsreason.train.run import Run
from dsreason.train.run_folder import start_state
from dsreason.train.sampler import Sampler

log = logging.getLogger(__name__)

MIN_SEQUENCES = 64
"""Completions that vLLM may draw at the same time, however few a rollout has: validation asks for all of its rows."""


@dataclass(kw_only=True)
class GRPORun(Run):
    config: GRPOConfig
    scorer: Scorer
    prompt_encoder: Encoder
    """Leaves room for the longest completion."""
    training_data: SampleDataset
    prompts: Iterator[Prompts]
    reference: ReferencePolicy | None
    """None where no KL is asked for."""
    objective: Objective
    banned_ids: Tensor
    """Media tokens, which no completion has."""
    batches_per_epoch: float
    """Of prompts."""
    next_batch: int
    """Of prompts, to be sampled next."""
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest rollout."""
    reward_sums: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    """What this rank's reward functions measured beside their scores, see `Scores.metric_sums`; not shown yet."""
    num_untrained: int = 0
    """Rollouts in a row that had nothing to train."""


@contextmanager
def build_grpo(config: GRPOConfig, output_dir: Path | None, resume: str | None) -> Iterator[GRPORun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    with ExitStack() as stack:
        run = open_run(config, output_dir, resume, command="grpo", check=check_grpo, stack=stack)
        config, world, model_path, watchdog = run.config, run.world, run.model_path, run.watchdog
        encoder, objective = build_encoder(config, model_path), objective_of(config.grpo)
        order = rollout_order(run.training, config)
        with watchdog.phase("load_model"):
            engine, reference, state = load_policy(run)
        record_run(run)

        total_steps = order.num_steps * config.grpo.optimizer_steps_per_rollout
        next_batch = int(state.extra.get("next_batch", 0))
        asker = prompt_encoder(config, encoder)
        prompts = PromptLoader(
            run.training,
            asker,
            order,
            config,
            exchange=gather_objects,
            rank=world.rank,
            world_size=world.size,
            start=next_batch,
            check=row_check(config),
        )
        metrics = metrics_of(run, state)
        with watchdog.phase("start_engine"):
            sampler = build_sampler(config, engine, model_path, encoder, watchdog, stack)
        scorer, metrics = stack.enter_context(open_scorer(config)), stack.enter_context(metrics)
        progress = open_progress(rank=world.rank, total_steps=total_steps, first_step=state.step)
        stack.enter_context(progress)
        writer = open_writer(run, engine, stack)
        yield GRPORun(
            config=config,
            world=world,
            output_dir=run.output_dir,
            model_path=model_path,
            engine=engine,
            encoder=encoder,
            prompt_encoder=asker,
            training_data=run.training,
            prompts=iter(prompts),
            validation_data=run.validation,
            sampler=sampler,
            reference=reference,
            objective=objective,
            banned_ids=torch.tensor(media_token_ids(encoder.processor.tokenizer, encoder.family), device=world.device),
            scorer=scorer,
            metrics=metrics,
            progress=progress,
            memory=sampler.memory,
            watchdog=watchdog,
            writer=writer,
            uploads=run.uploads,
            stop=run.stop,
            finite=finite_check(config, run.output_dir, world, state),
            total_steps=total_steps,
            batches_per_epoch=order.rows_per_epoch / config.grpo.prompts_per_step,
            state=state,
            next_batch=next_batch,
        )


def check_reference_folder(config: GRPOConfig, world: World) -> None:
    """ConfigError where a resumed run could not read the newest reference: the first host alone has it."""
    if world.folder_ranks and config.grpo.reference_reset_every:
        raise ConfigError(
            f"grpo.reference_reset_every ({config.grpo.reference_reset_every}) needs an output folder that all hosts share, and "
            f"{config.output_dir} is another one on every host; give such a folder, or set it to 0"
        )


def load_policy(run: OpenedRun[GRPOConfig]) -> tuple[DeepSpeedEngine, ReferencePolicy | None, TrainerState]:
    """The policy with its optimizer, the reference where there is a KL, and where the run starts. Every rank calls it."""
    check_reference_folder(run.config, run.world)
    engine = build_policy_engine(run.config, run.deepspeed, run.model_path)
    # Before a checkpoint is loaded.
    reference = ReferencePolicy(engine) if objective_of(run.config.grpo).kl_coef else None
    state = start_state(engine, run.checkpoint, run.config, run.model_path, run.world)
    if run.checkpoint is not None and reference is not None:
        load_reference(reference, run.config, run.checkpoint, run.output_dir)
    return engine, reference, state


def build_sampler(
    config: GRPOConfig,
    engine: DeepSpeedEngine,
    model_path: Path,
    encoder: Encoder,
    watchdog: Watchdog,
    stack: ExitStack,
) -> Sampler:
    """The rollout engine, until `stack` closes, beside the policy's. Every rank calls it."""
    offload = StateOffload(engine)
    log.info(offload.describe())
    offload.offload()  # vLLM starts only where its share of the GPU is free
    rollout = build_rollout_engine(config, model_path, encoder, watchdog.world, stack)
    offload.reload()
    memory = MemoryLedger(watchdog.world.device)
    return Sampler(rollout, engine, offload, memory, config.rollout.sync_bucket_mb, watchdog.phase)


def build_rollout_engine(
    config: GRPOConfig, model_path: Path, encoder: Encoder, world: World, stack: ExitStack
) -> RolloutEngine:
    """What samples the completions, until `stack` closes. Every rank calls it."""
    if config.rollout.engine == "transformers":
        return build_rollout(config, model_path, encoder, world, config.rollout.batch_size)
    from dsreason.rollout.vllm_engine import VLLMEngine  # only where it is used: it imports vLLM

    engine = VLLMEngine(
        model_path,
        encoder.processor.tokenizer,
        world,
        dtype=DTYPES[config.train.precision],
        # A held-out prompt may be as long as model.max_length by itself.
        max_model_len=config.model.max_length + config.validation.max_completion_length,
        tensor_parallel_size=config.rollout.tensor_parallel_size,
        gpu_memory_utilization=config.rollout.gpu_memory_utilization,
        sleep_level=config.rollout.sleep_level,
        enforce_eager=config.rollout.enforce_eager,
        max_num_seqs=completions_together(config, world),
        engine_options=config.rollout.engine_options,
        trust_remote_code=config.model.trust_remote_code,
    )
    stack.callback(engine.shutdown)
    return engine


def completions_together(config: GRPOConfig, world: World) -> int:
    """What one engine is asked for in one rollout; at least what validation may ask for as well."""
    engines = world.size // config.rollout.tensor_parallel_size
    prompts = -(-config.grpo.prompts_per_step // engines)
    return max(prompts * config.grpo.num_generations, MIN_SEQUENCES)
