"""Supervised fine-tuning: samples → micro-batches → log-probabilities → loss → optimizer step."""

from __future__ import annotations

import math
import time
from pathlib import Path

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import SFTConfig
from dsreason.data.loader import StepBatches
from dsreason.errors import DsReasonError
from dsreason.export import export_engine
from dsreason.losses.sft import sft_loss
from dsreason.runtime.checkpoint import prune_checkpoints, save_checkpoint
from dsreason.runtime.engine import engine_grad_norm, set_learning_rate
from dsreason.runtime.schedule import lr_factor
from dsreason.runtime.world import World, all_sum
from dsreason.train.build import SFTRun, build_sft
from dsreason.train.validate import validate


def run(config: SFTConfig, *, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_sft(config, output_dir, resume) as sft:
        train(sft)


def train(sft: SFTRun) -> None:
    if sft.state.step == 0 and sft.config.validation.before_training:
        run_validation(sft)
    for batches in sft.loader:  # starts after the resumed step
        started = time.perf_counter()
        lr = sft.config.optim.lr * lr_factor(sft.state.step, sft.total_steps, sft.config.optim)
        metrics = sft_step(sft.engine, batches, lr=lr, world=sft.world)
        sft.finish_step(batches, metrics, seconds=time.perf_counter() - started)

        step, last = sft.state.step, sft.state.step == sft.total_steps
        improved = run_validation(sft) if last or is_due(step, sft.config.validation.every) else False
        if last or improved or is_due(step, sft.config.checkpoint.every):
            save(sft, last=last)


def sft_step(engine: DeepSpeedEngine, batches: StepBatches, *, lr: float, world: World) -> dict[str, float]:
    """One optimizer step over one global batch, however it was cut into micro-batches and over ranks."""
    set_learning_rate(engine, lr)
    total = 0.0
    for i, batch in enumerate(batches.micro_batches):  # every rank runs the same number: forwards are collectives
        logprobs = engine(batch.to(engine.device))
        loss = sft_loss(logprobs, num_tokens=batches.num_tokens)
        engine.set_gradient_accumulation_boundary(i == len(batches.micro_batches) - 1)
        # DeepSpeed averages gradients over ranks; the loss is already a share of the global mean, so undo that.
        engine.backward(loss * world.size, scale_wrt_gas=False)
        engine.step()
        total += loss.item()
    metrics = {"train/loss": all_sum(total), "train/learning_rate": lr, "train/grad_norm": engine_grad_norm(engine)}
    if not all(math.isfinite(value) for value in metrics.values()):
        raise DsReasonError(
            f"step {engine.global_steps}: loss {metrics['train/loss']}, gradient norm {metrics['train/grad_norm']}; "
            f"lower optim.lr ({lr:g} in this step) or look at the samples of this step: {batches.sample_ids}"
        )
    return metrics


def run_validation(sft: SFTRun) -> bool:
    """Measure the held-out rows; True where this is the best so far and worth a checkpoint."""
    if sft.validation_data is None:
        return False
    result = validate(sft)
    sft.metrics.scalars(sft.state.step, result.metrics)
    return sft.note_best(result.metrics)


def save(sft: SFTRun, *, last: bool) -> None:
    """Checkpoint, delete what `checkpoint.keep` no longer covers, and export where the config asks for it."""
    config, step = sft.config.checkpoint, sft.state.step
    ...


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
