"""Building a GRPO run: prompts, model, engine, sampler, rewards, and what shows the run to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.prompts import PromptLoader, Prompts
from dsreason.engine.reference import BaseReference, Reference, ReferencePolicy
from dsreason.errors import ConfigError
from dsreason.job.ranks import World, gather_objects
from dsreason.losses.objective import Objective, objective_of
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.opening import EngineSettings
from dsreason.rollout.protocol import media_token_ids
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.rollout.vllm_arguments import MIN_SEQUENCES, VLLMSettings
from dsreason.train.common.arithmetic import Arithmetic, arithmetic_of
from dsreason.train.common.opening import OpenedRun, Run, build_policy_engine, open_run, start_policy, start_run
from dsreason.train.grpo.check_rewards import row_check
from dsreason.train.grpo.preflight import check, num_steps, prompt_encoder, rollout_order
from dsreason.train.grpo.reference import load_reference
from dsreason.train.grpo.teacher import Teacher, open_teacher


@dataclass(kw_only=True)
class GRPORun(Run[GRPOConfig]):
    """What GRPO has beside the parts of every run."""

    scorer: Scorer
    prompt_encoder: Encoder
    """Leaves room for the longest completion."""
    prompts: Iterator[Prompts]
    reference: Reference | None
    """None where no KL is asked for."""
    teacher: Teacher | None
    """None where nothing is distilled."""
    objective: Objective
    arithmetic: Arithmetic
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
        opened = open_run(config, output_dir, resume, command="grpo", check=check, stack=stack)
        config, world, encoder = opened.config, opened.world, opened.encoder
        order = rollout_order(opened.training, config)
        banned_ids = torch.tensor(media_token_ids(encoder.processor.tokenizer, encoder.family), device=world.device)
        with opened.watchdog.phase("load_model"):
            engine, reference, state = load_policy(opened)
            teacher = open_teacher(config, banned_ids, world, state.extra)
        run = start_run(
            opened,
            stack,
            engine=engine,
            settings=engine_settings(config, world),
            state=state,
            scorer=Scorer(config.reward),
            bucket_mb=config.rollout.sync_bucket_mb,
            offload=config.rollout.offload,
            total_steps=num_steps(order, config),
        )
        asker, next_batch = prompt_encoder(config, encoder), int(state.extra.get("next_batch", 0))
        prompts = PromptLoader(
            opened.training,
            asker,
            order,
            config,
            exchange=gather_objects,
            rank=world.rank,
            world_size=world.size,
            ranks_per_row=world.ranks_per_row,
            start=next_batch,
            check=row_check(config),
        )
        yield GRPORun(
            **vars(run),
            prompt_encoder=asker,
            prompts=iter(prompts),
            reference=reference,
            teacher=teacher,
            objective=objective_of(config.grpo),
            arithmetic=arithmetic_of(engine, world),
            banned_ids=banned_ids,
            batches_per_epoch=order.rows_per_epoch / config.grpo.prompts_per_step,
            next_batch=next_batch,
        )


def load_policy(opened: OpenedRun[GRPOConfig]) -> tuple[DeepSpeedEngine, Reference | None, TrainerState]:
    """The policy with its optimizer, the reference where there is a KL, and where the run starts. Every rank calls it."""
    config, model_path = opened.config, opened.model_path
    # A resumed run could not read the newest reference: the first host alone has it.
    if opened.world.folder_ranks and config.grpo.reference_reset_every:
        raise ConfigError(
            f"grpo.reference_reset_every ({config.grpo.reference_reset_every}) needs an output folder that all hosts share, and "
            f"{config.output_dir} is another one on every host; give such a folder, or set it to 0"
        )
    engine = build_policy_engine(config, opened.deepspeed, model_path, opened.world.group)
    reference: Reference | None = None
    if objective_of(config.grpo).kl_coef:  # before a checkpoint is loaded
        reference = BaseReference(engine) if config.lora.rank else ReferencePolicy(engine)
    state = start_policy(opened, engine)
    if opened.checkpoint is not None and isinstance(reference, ReferencePolicy):
        load_reference(reference, config, opened.checkpoint, opened.output_dir)
    return engine, reference, state


def engine_settings(config: GRPOConfig, world: World) -> EngineSettings:
    rollout = config.rollout
    if rollout.engine == "transformers":
        return TransformersSettings(attention=config.model.attention, batch_size=rollout.batch_size)
    return VLLMSettings(
        # A held-out prompt may be as long as model.max_length by itself.
        max_model_len=config.model.max_length + config.validation.max_completion_length,
        tensor_parallel_size=rollout.tensor_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        sleep_level=rollout.sleep_level,
        enforce_eager=rollout.enforce_eager,
        max_num_seqs=completions_per_engine(config, world),
        engine_options=rollout.engine_options,
    )


def completions_per_engine(config: GRPOConfig, world: World) -> int:
    """What one engine is asked for in one rollout; at least what validation may ask for as well."""
    engines = world.size // config.rollout.tensor_parallel_size
    prompts = -(-config.grpo.prompts_per_step // engines)
    return max(prompts * config.grpo.num_generations, MIN_SEQUENCES)
