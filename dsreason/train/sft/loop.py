"""The SFT training loop: samples → micro-batches → log-probabilities → loss → optimizer step."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.config.schema import SFTConfig
from dsreason.data.loader import StepBatches
from dsreason.engine.engine import add_gradient, take_optimizer_step
from dsreason.engine.router import RouterTerm
from dsreason.job.ranks import World, reduce_sum
from dsreason.losses.sft import compute_sft_loss
from dsreason.phases import record_phase
from dsreason.train.common.global_batches import show_batches, train_on_loader
from dsreason.train.sft.build import SFTTrainer, build_sft


def run(config: SFTConfig, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Run SFT training; every rank of a job calls this. Return once the last checkpoint and the export are on disk."""
    with build_sft(config, output_dir, resume) as sft:
        train_on_loader(sft.run, sft.loader, partial(train_on_batches, sft), sft.validate)


def train_on_batches(sft: SFTTrainer, batches: StepBatches) -> None:
    """Run one optimizer step on a global batch, count it and log its metrics."""
    run, engine, started = sft.run, sft.engine, time.perf_counter()
    with run.memory.track_phase("train"):
        metrics = run_sft_step(engine, batches, lr=run.learning_rate, world=sft.world)
        metrics = run.finite.metrics(metrics, batches.micro_batches, engine.global_steps)
    if not batches.num_tokens:
        metrics.pop("train/loss")  # without tokens to train on, there is no mean loss
    seconds = time.perf_counter() - started
    run.count_step(epoch=engine.global_steps / sft.steps_per_epoch, learned=batches.num_tokens > 0)
    progress_values = {"loss": metrics["train/loss"]} if "train/loss" in metrics else {}
    show_batches(run, sft.utilisation, batches, metrics, progress_values, seconds=seconds)


def run_sft_step(engine: DeepSpeedEngine, batches: StepBatches, *, lr: float, world: World) -> dict[str, float]:
    """Run one optimizer step on a global batch. The result does not depend on how the batch is divided."""
    metrics = accumulate_gradients(engine, batches, world)
    return metrics | take_optimizer_step(engine, lr)


def accumulate_gradients(engine: DeepSpeedEngine, batches: StepBatches, world: World) -> dict[str, float]:
    """Run the forward and backward passes of all micro-batches.

    Returns:
        The mean loss per trained token of the global batch, and, for a mixture of experts, metrics of the routing.
    """
    router = RouterTerm(engine.module, batches.num_tokens)
    losses: list[Tensor] = []  # read after the loop, because reading waits for the GPU
    # All ranks have the same number of micro-batches, because the forward pass is collective.
    for i, batch in enumerate(batches.micro_batches):
        with record_phase("forward"):
            logprobs = engine(batch.to(engine.device))
            loss = compute_sft_loss(logprobs, num_tokens=batches.num_tokens)
        total = router.add_to(loss, batch)
        add_gradient(engine, total, world.size, last=i == len(batches.micro_batches) - 1)
        losses.append(loss.detach())
    # All ranks that share a row report the loss of that row.
    mean = reduce_sum(sum(map(float, losses))) / world.ranks_per_row
    return {"train/loss": mean} | router.compute_metrics(world)
