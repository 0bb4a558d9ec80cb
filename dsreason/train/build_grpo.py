"""Building a GRPO run: folder, prompts, model, engine, sampler, rewards, and what shows the run to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import dump_config
from dsreason.config.output import default_output_dir, write_run_config
from dsreason.config.schema import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.prompts import PromptLoader
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.protocol import RolloutEngine, media_token_ids
from dsreason.runtime.checkpoint import TrainerState
from dsreason.runtime.logs import setup_logs
from dsreason.runtime.memory import MemoryLedger
from dsreason.runtime.metrics import Metrics, open_metrics
from dsreason.runtime.progress import Progress, open_progress
from dsreason.runtime.record import run_facts
from dsreason.runtime.world import (
    World,
    agree,
    broadcast_object,
    first_rank_first,
    init_world,
    on_rank_zero,
    seed_everything,
    shutdown,
)
from dsreason.train.build import (
    build_policy_engine,
    build_rollout,
    check_shared,
    open_output_dir,
    start_state,
)
from dsreason.train.preflight import DTYPES, build_encoder, check_grpo, find_model, rollout_order


@dataclass
class GRPORun:
    """The parts of a run on one rank; `state` says how far it is."""

    config: GRPOConfig
    world: World
    output_dir: Path
    model_path: Path
    engine: DeepSpeedEngine
    encoder: Encoder
    prompts: PromptLoader
    validation_data: SampleDataset
    rollout: RolloutEngine
    banned_ids: Tensor
    """Media tokens, which no completion has."""
    scorer: Scorer
    metrics: Metrics
    progress: Progress
    memory: MemoryLedger
    total_steps: int
    steps_per_epoch: float
    state: TrainerState
    rollout_metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest rollout."""

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / "checkpoints"


@contextmanager
def build_grpo(config: GRPOConfig, output_dir: Path | None, resume: str | None) -> Iterator[GRPORun]:
    """Join the job, check and build everything; on the way out close what was opened. Every rank calls it."""
    world = init_world()
    with ExitStack() as stack:
        stack.callback(shutdown)
        output_dir = broadcast_object(output_dir or default_output_dir("grpo"))
        config = config.model_copy(update={"output_dir": str(output_dir)})
        checkpoint = on_rank_zero(lambda: open_output_dir(output_dir, config, resume))
        check_shared(output_dir, world)
        setup_logs(output_dir, world.rank)
        on_rank_zero(lambda: check_grpo(config))
        with first_rank_first(world):
            model_path = find_model(config)
            training, validation = open_datasets(config.data)

        deepspeed_config = resolve_deepspeed(config.deepspeed, config, device=world.device.type, world_size=world.size)
        seed_everything(config.train.seed, world.rank)
        encoder = build_encoder(config, model_path)
        order = rollout_order(training, config)
        engine = build_policy_engine(config, deepspeed_config, model_path)
        state = start_state(engine, checkpoint, config, model_path, world)
        facts = run_facts(world.size) | {"deepspeed": deepspeed_config, "model_path": str(model_path.resolve())}
        on_rank_zero(lambda: write_run_config(output_dir, config, facts))

        steps = config.grpo.optimizer_steps_per_rollout
        total_steps = order.num_steps * steps
        scorer = Scorer(config.reward.functions, workers=config.reward.workers, time_limit=config.reward.time_limit)
        progress = open_progress(rank=world.rank, total_steps=total_steps, first_step=state.step)
        metrics = open_metrics(
            output_dir,
            rank=world.rank,
            resume_step=state.step if checkpoint is not None else None,
            config=config.monitor,
            run_config=dump_config(config),
        )
        yield GRPORun(
            config=config,
            world=world,
            output_dir=output_dir,
            model_path=model_path,
            engine=engine,
            encoder=encoder,
            prompts=PromptLoader(
                training,
                encoder,
                order,
                config.data,
                agree,
                rank=world.rank,
                world_size=world.size,
                start=state.step // steps,
            ),
            validation_data=validation,
            rollout=build_sampler(config, model_path, encoder, world, stack),
            banned_ids=torch.tensor(media_token_ids(encoder.processor.tokenizer), device=world.device),
            scorer=stack.enter_context(scorer),
            metrics=stack.enter_context(metrics),
            progress=stack.enter_context(progress),
            memory=MemoryLedger(world.device),
            total_steps=total_steps,
            steps_per_epoch=order.rows_per_epoch / config.grpo.prompts_per_step * steps,
            state=state,
        )


def build_sampler(
    config: GRPOConfig, model_path: Path, encoder: Encoder, world: World, stack: ExitStack
) -> RolloutEngine:
    """What samples the completions, until `stack` closes. Every rank calls it."""
    if config.rollout.engine == "transformers":
        return build_rollout(config, model_path, encoder, world)
    from dsreason.rollout.vllm_engine import VLLMEngine  # only where it is used: it imports vLLM

    engine = VLLMEngine(
        model_path,
        encoder.processor.tokenizer,
        world,
        dtype=DTYPES[config.train.precision],
        max_model_len=config.model.max_length,
        tensor_parallel_size=config.rollout.tensor_parallel_size,
        gpu_memory_utilization=config.rollout.gpu_memory_utilization,
        sleep_level=config.rollout.sleep_level,
        trust_remote_code=config.model.trust_remote_code,
    )
    stack.callback(engine.shutdown)
    return engine
