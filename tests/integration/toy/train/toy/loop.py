"""A trainer that is as small as one can be: each rank takes its rows in their order."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from dsreason.config.schema_toy import ToyConfig
from dsreason.train.toy.preflight import check

from dsreason.data.micro_batches import align_micro_batches
from dsreason.engine.engine import add_gradient, engine_grad_norm, set_learning_rate
from dsreason.job.ranks import all_sum, gather_objects
from dsreason.losses.sft import sft_loss
from dsreason.rollout.transformers_engine import TransformersSettings
from dsreason.train.common.opening import Run, build_policy_engine, open_run, start_run, validate_policy
from dsreason.train.common.run_folder import start_state
from dsreason.train.common.saving import finish, poll_checkpoint
from dsreason.train.common.steps import after_steps, before_steps, count_step, learning_rate, show_step


def run(config: ToyConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    with ExitStack() as stack:
        opened = open_run(config, output_dir, resume, command="toy", check=check, stack=stack)
        config, model_path = opened.config, opened.model_path
        engine = build_policy_engine(config, opened.deepspeed, model_path)
        state = start_state(engine, opened.checkpoint, config, model_path, opened.world)
        steps = config.train.max_steps or len(opened.training) // config.toy.batch_size
        settings = TransformersSettings()
        train(start_run(opened, stack, engine=engine, settings=settings, state=state, total_steps=steps))


def train(toy: Run[ToyConfig]) -> None:
    before_steps(toy, validate_policy)
    while toy.state.step < toy.total_steps:
        poll_checkpoint(toy)
        started, first = time.perf_counter(), toy.state.step
        with toy.watchdog.phase("step"), toy.memory.phase("train"):
            metrics, num_tokens = toy_step(toy)
        seconds, rows = time.perf_counter() - started, toy.config.toy.batch_size
        count_step(toy, epoch=toy.engine.global_steps * rows / len(toy.training))
        show_step(toy, metrics, {}, num_samples=rows, num_tokens=num_tokens, seconds=seconds)
        after_steps(toy, first, validate_policy)
    finish(toy)


def toy_step(toy: Run[ToyConfig]) -> tuple[dict[str, float], int]:
    """One optimizer step over this rank's share of the next rows."""
    engine, world, size, lr = toy.engine, toy.world, toy.config.toy.batch_size, learning_rate(toy)
    rows = range(toy.state.step * size, (toy.state.step + 1) * size)[world.rank :: world.size]
    samples = [toy.encoder.encode(toy.training[row % len(toy.training)]) for row in rows]
    (batch,) = align_micro_batches([samples], toy.encoder, gather_objects, packing=toy.config.train.packing)
    num_tokens = int(all_sum(sum(map(len, samples))))
    set_learning_rate(engine, lr)
    loss = toy.config.toy.scale * sft_loss(engine(batch.to(engine.device)), num_tokens=num_tokens)
    add_gradient(engine, loss, world.size, last=True)
    engine.step()
    metrics = {
        "train/loss": all_sum(loss.item()),
        "train/learning_rate": lr,
        "train/grad_norm": engine_grad_norm(engine),
    }
    return toy.finite.metrics(metrics, [batch], engine.global_steps), num_tokens
