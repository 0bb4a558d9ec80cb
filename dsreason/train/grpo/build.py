"""Setup of a GRPO run: prompts, model, engine, sampler, rewards, metrics and progress display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.prompts import PromptLoader
from dsreason.engine.reference import BaseReference, KLReference, ReferencePolicy
from dsreason.errors import ConfigError
from dsreason.job.ranks import World, gather_objects
from dsreason.losses.objective import Objective, build_objective
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.opening import EngineSettings
from dsreason.rollout.protocol import find_media_token_ids
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.rollout.vllm_arguments import MIN_SEQUENCES, VLLMSettings
from dsreason.train.common.answers import ValidationResult
from dsreason.train.common.job import TrainingJob
from dsreason.train.common.learning import LearningWatch
from dsreason.train.common.opening import (
    TrainingRows,
    build_policy_engine,
    open_policy_job,
    start_policy,
    start_policy_run,
)
from dsreason.train.common.run import TrainingRun
from dsreason.train.common.sampler import Sampler
from dsreason.train.common.utilisation import UtilisationMeter, build_utilisation_meter
from dsreason.train.common.validate import HeldOut, validate
from dsreason.train.grpo.check_rewards import build_row_check
from dsreason.train.grpo.preflight import build_prompt_encoder, build_rollout_order, check, count_optimizer_steps
from dsreason.train.grpo.reference import load_reference
from dsreason.train.grpo.reward_counts import RolloutCounts, find_reward_problems
from dsreason.train.grpo.sampling import RolloutSampler
from dsreason.train.grpo.teacher import Teacher, open_teacher


@dataclass(kw_only=True)
class GRPOTrainer:
    """The components of a GRPO run."""

    job: TrainingJob[GRPOConfig]
    run: TrainingRun[GRPOConfig]
    engine: DeepSpeedEngine
    rows: TrainingRows
    prompt_encoder: Encoder
    """Encoder for prompts that leaves room for the longest completion."""
    sampler: Sampler
    held_out: HeldOut[GRPOConfig]
    rollouts: RolloutSampler
    scorer: Scorer
    reference: KLReference | None
    """Reference policy for the KL term; None if there is no KL term."""
    teacher: Teacher | None
    """Teacher to distill from; None if distillation is off."""
    objective: Objective
    utilisation: UtilisationMeter
    banned_ids: Tensor
    """Ids of the media tokens, which the policy must not sample."""
    batches_per_epoch: float
    """Number of prompt batches per epoch."""
    watch: LearningWatch[RolloutCounts]
    num_untrained: int = 0
    """Number of consecutive rollouts, up to and including the latest, that had no trainable completion."""

    @property
    def extra(self) -> dict[str, Any]:
        """GRPO-specific state to store in a checkpoint, in addition to the state that all trainers store."""
        teacher = {"teacher": self.teacher.fingerprint} if self.teacher else {}
        return {"next_batch": self.rollouts.next_batch} | teacher

    def validate(self, step: int) -> ValidationResult | None:
        return validate(self.sampler, self.held_out, version=step, progress=self.run.progress, scorer=self.scorer)


@contextmanager
def build_grpo(config: GRPOConfig, output_dir: Path | None, resume: str | None) -> Iterator[GRPOTrainer]:
    """Join the job, check the config and build the trainer; release its resources on exit. Collective."""
    with ExitStack() as stack:
        job, rows = open_policy_job(config, output_dir, resume, command="grpo", check=check, stack=stack)
        config, world, encoder = job.config, job.world, rows.encoder
        order = build_rollout_order(rows.training, config)
        banned_ids = torch.tensor(
            find_media_token_ids(encoder.processor.tokenizer, encoder.family), device=world.device
        )
        with job.watchdog.track_phase("load_model"):
            engine, reference, state = load_policy(job)
            teacher = open_teacher(config, banned_ids, world, state.extra)
        scorer = Scorer(config.reward)
        run, sampler = start_policy_run(
            job,
            rows,
            stack,
            engine=engine,
            settings=build_engine_settings(config, world),
            state=state,
            scorer=scorer,
            bucket_mb=config.rollout.sync_bucket_mb,
            offload=config.rollout.offload,
            total_steps=count_optimizer_steps(order, config),
        )
        loader_encoder, next_batch = build_prompt_encoder(config, encoder), int(state.extra.get("next_batch", 0))
        prompts = PromptLoader(
            rows.training,
            loader_encoder,
            order,
            config,
            exchange=gather_objects,
            rank=world.rank,
            world_size=world.size,
            ranks_per_row=world.ranks_per_row,
            start=next_batch,
            check=build_row_check(config),
        )
        objective = build_objective(config.grpo)
        yield GRPOTrainer(
            job=job,
            run=run,
            engine=engine,
            rows=rows,
            prompt_encoder=loader_encoder,
            sampler=sampler,
            held_out=HeldOut(rows.validation, encoder, config, world),
            rollouts=RolloutSampler(
                config, objective, iter(prompts), sampler, scorer, world, job.watchdog, run.count_skipped, next_batch
            ),
            scorer=scorer,
            reference=reference,
            teacher=teacher,
            objective=objective,
            utilisation=build_utilisation_meter(engine, world),
            banned_ids=banned_ids,
            batches_per_epoch=order.rows_per_epoch / config.grpo.prompts_per_step,
            watch=LearningWatch(partial(find_reward_problems, config=config)),
        )


def load_policy(job: TrainingJob[GRPOConfig]) -> tuple[DeepSpeedEngine, KLReference | None, TrainerState]:
    """Load the policy and its optimizer, the KL reference (None without a KL term) and the initial state. Collective."""
    config, model_path = job.config, job.model_path
    # Without a shared folder, only the first host would hold the latest reference, so a resumed run could not load it.
    if job.world.folder_ranks and config.grpo.reference_reset_every:
        raise ConfigError(
            f"grpo.reference_reset_every ({config.grpo.reference_reset_every}) needs an output folder that all hosts share, but "
            f"{config.output_dir} is a separate folder on each host; use a shared folder, or set it to 0"
        )
    engine = build_policy_engine(config, job.deepspeed, model_path, job.world.group)
    reference: KLReference | None = None
    # The reference is the initial model, so it must be created before a checkpoint is loaded.
    if build_objective(config.grpo).kl_coef:
        reference = BaseReference(engine) if config.lora.rank else ReferencePolicy(engine)
    state = start_policy(job, engine)
    if job.checkpoint is not None and isinstance(reference, ReferencePolicy):
        load_reference(reference, config, job.checkpoint, job.output_dir)
    return engine, reference, state


def build_engine_settings(config: GRPOConfig, world: World) -> EngineSettings:
    rollout = config.rollout
    if rollout.engine == "transformers":
        return TransformersSettings(attention=config.model.attention, batch_size=rollout.batch_size)
    return VLLMSettings(
        # A held-out prompt may have up to model.max_length tokens, not counting its completion.
        max_model_len=config.model.max_length + config.validation.max_completion_length,
        tensor_parallel_size=rollout.tensor_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        sleep_level=rollout.sleep_level,
        enforce_eager=rollout.enforce_eager,
        max_num_seqs=count_completions_per_engine(config, world),
        engine_options=rollout.engine_options,
    )


def count_completions_per_engine(config: GRPOConfig, world: World) -> int:
    """Return the maximum number of completions that one engine samples per rollout, but at least `MIN_SEQUENCES`, because
    validation may need more."""
    engines = world.size // config.rollout.tensor_parallel_size
    prompts = -(-config.grpo.prompts_per_step // engines)
    return max(prompts * config.grpo.num_generations, MIN_SEQUENCES)
