"""Supervised fine-tuning: samples → micro-batches → log-probabilities → loss → optimizer step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from deepspeed import DeepSpeedEngine

from dsreason.config.schema import SFTConfig
from dsreason.data.collate import GRIDS
from dsreason.data.loader import StepBatches
from dsreason.export import export_engine
from dsreason.losses.sft import sft_loss
from dsreason.runtime.checkpoint_folder import MARKER, STATE_FILE, as_save_error, delete_folder, read_json
from dsreason.runtime.engine import engine_grad_norm, set_learning_rate
from dsreason.runtime.logs import set_step
from dsreason.runtime.schedule import lr_factor
from dsreason.runtime.stop import stopped
from dsreason.runtime.world import World, all_sum, on_rank_zero
from dsreason.train.build import SFTRun, build_sft
from dsreason.train.run import Run
from dsreason.train.validate import validate

log = logging.getLogger(__name__)


def run(config: SFTConfig, *, output_dir: Path | None = None, resume: str | None = None) -> None:
    """Train on every rank of a started job; returns when the last checkpoint and the export are on disk."""
    with build_sft(config, output_dir, resume) as sft:
        train(sft)


def train(sft: SFTRun) -> None:
    config = sft.config
    if sft.state.step == 0 and config.validation.before_training:
        run_validation(sft)
    for batches in watched(sft):
        with sft.watchdog.phase("checkpoint"):
            follow_up(sft, sft.writer.poll())
        started = time.perf_counter()
        lr = config.optim.lr * lr_factor(sft.state.step, sft.total_steps, config.optim)
        with sft.watchdog.phase("step"):
            with sft.memory.phase("train"):
                metrics = sft_step(sft.engine, batches, lr=lr, world=sft.world)
                metrics = sft.finite.metrics(metrics, batches.micro_batches, sft.engine.global_steps)
            finish_step(sft, batches, metrics, seconds=time.perf_counter() - started)

        step, last = sft.state.step, sft.state.step == sft.total_steps
        improved = run_validation(sft) if last or is_due(step, config.validation.every) else False
        if last or improved or is_due(step, config.checkpoint.every):
            save(sft, last=last)
        stop_if_asked(sft)
    finish(sft)


def watched(sft: SFTRun) -> Iterator[StepBatches]:
    """The batches of each step, from the resumed one on."""
    batches = iter(sft.loader)
    while True:
        with sft.watchdog.phase("data"):
            found = next(batches, None)
        if found is None:
            return
        yield found


def sft_step(engine: DeepSpeedEngine, batches: StepBatches, *, lr: float, world: World) -> dict[str, float]:
    """One optimizer step over one global batch, however it was cut into micro-batches and over ranks."""
    set_learning_rate(engine, lr)
    loss = accumulate_gradients(engine, batches, world)
    engine.step()
    return {"train/loss": loss, "train/learning_rate": lr, "train/grad_norm": engine_grad_norm(engine)}


def accumulate_gradients(engine: DeepSpeedEngine, batches: StepBatches, world: World) -> float:
    """Forward and backward of every micro-batch; returns the mean loss over the trained tokens of the global batch."""
    total = 0.0
    for i, batch in enumerate(batches.micro_batches):  # every rank runs the same number: forwards are collectives
        last = i == len(batches.micro_batches) - 1
        logprobs = engine(batch.to(engine.device))
        loss = sft_loss(logprobs, num_tokens=batches.num_tokens)
        engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the loss is a share of the global mean already, so undo that.
        engine.backward(loss * world.size, scale_wrt_gas=False)
        if not last:
            engine.step()
        total += loss.item()
    return all_sum(total)


def finish_step(sft: SFTRun, batches: StepBatches, metrics: dict[str, float], *, seconds: float) -> None:
    """Count the step and show it."""
    step = sft.engine.global_steps
    epoch = step / sft.steps_per_epoch
    consumed = step * sft.config.train.global_batch_size
    sft.state = replace(sft.state, step=step, epoch=epoch, consumed_samples=consumed, extra=sft.finite.counts)
    set_step(step)
    whole = seconds + batches.data_seconds
    shown = {"loss": metrics["train/loss"]} if "train/loss" in metrics else {}
    sft.progress.step(step, shown, samples=batches.num_samples, tokens=batches.num_input_tokens)
    memory = sft.memory.take()
    note_skipped(sft, batches.skipped)
    if step % sft.config.monitor.log_every and step != sft.total_steps:
        return
    metrics |= {
        "train/epoch": epoch,
        "train/tokens": batches.num_tokens,
        "train/skipped_rows": sft.num_skipped,
        "time/data": batches.data_seconds,
        "time/train": seconds,
        "perf/tokens_per_second": batches.num_input_tokens / whole,
    }
    if sft.peak_flops is not None:
        metrics["perf/mfu"] = step_flops(sft, batches) / whole / sft.peak_flops
    sft.metrics.scalars(step, metrics | memory)


def note_skipped(run: Run, skipped: list[str]) -> None:
    """Count every use of a row that is left out, and name each row once."""
    run.num_skipped += len(skipped)
    for text in dict.fromkeys(skipped):
        if text not in run.named_skipped:
            run.named_skipped.add(text)
            log.warning("left out: %s", text)


def step_flops(sft: SFTRun, batches: StepBatches) -> float:
    """FLOPs of the step on all ranks. Collective."""
    lengths = [n for batch in batches.micro_batches for n in batch.attention_mask.sum(dim=1).tolist()]
    grids = [
        grid
        for batch in batches.micro_batches
        for key in GRIDS.values()
        if key in batch.mm_kwargs
        for grid in batch.mm_kwargs[key].tolist()
    ]
    trained = sum(int(batch.loss_mask.sum()) for batch in batches.micro_batches)
    return all_sum(sft.flops.step(lengths=lengths, trained_tokens=trained, grids=grids))


def run_validation(run: Run) -> bool:
    """Measure the held-out rows; True where they are the best so far, which is worth a checkpoint."""
    config, step = run.config, run.state.step
    if len(run.validation_data) == 0:
        return False
    with run.watchdog.phase("validation"):
        result = validate(
            run.sampler,
            run.validation_data,
            run.encoder,
            config,
            run.world,
            version=step,
            progress=run.progress,
            scorer=run.scorer,
        )
    run.metrics.scalars(step, result.metrics)
    run.progress.say(result.summary(step))
    result.write(run.output_dir, step, run.metrics, run.world)
    value, best = result.metrics[config.checkpoint.best_metric], run.state.best_metric
    better = best is None or (value < best if config.checkpoint.best_metric == "val/loss" else value > best)
    if better and step > 0:
        run.state = replace(run.state, best_metric=value, best_name=config.checkpoint.best_metric, best_step=step)
    return better and step > 0 and config.checkpoint.keep_best


def save(run: Run, *, last: bool) -> None:
    """Checkpoint, which is written beside training unless it is the last, and export where the configuration asks for it."""
    config, step = run.config.checkpoint, run.state.step
    started = time.perf_counter()
    with run.watchdog.phase("checkpoint"), run.progress.phase("saving checkpoint"):
        follow_up(run, run.writer.wait())
        run.writer.start(step, run.state)
        if last:
            follow_up(run, run.writer.wait())
    if config.export == "all" or (last and config.export == "final"):
        export(run, run.output_dir / "export" / ("final" if last else f"step_{step}"), last=last)
    run.metrics.scalars(step, {"time/save": time.perf_counter() - started})


def stop_if_asked(run: Run) -> None:
    """Save and raise `Stopped` where a rank got a signal; a run that is done anyway goes on to its end."""
    step, name = run.state.step, run.stop.asked()
    if not name or step == run.total_steps:
        return
    checkpoint = run.checkpoints / f"step_{step}"
    with run.watchdog.phase("checkpoint"), run.progress.phase(f"{name}: saving checkpoint"):
        follow_up(run, run.writer.wait())
        if not on_rank_zero(lambda: (checkpoint / MARKER).is_file()):
            run.writer.start(step, run.state)
            follow_up(run, run.writer.wait())
    raise stopped(name, step)


def follow_up(run: Run, written: Path | None) -> None:
    """Once a checkpoint is complete, upload it, and delete those that `checkpoint.keep` no longer covers."""
    if written is None or not run.world.keeps_folder:
        return
    config = run.config.checkpoint
    run.metrics.scalars(run.state.step, {"time/save_complete": run.writer.completing})
    run.uploads.add(written, last=written.name == f"step_{run.total_steps}")
    # The best of now may not be on disk yet: until then the best of when this one was saved stays, too.
    bests = {run.state.best_step, read_json(written / STATE_FILE)["state"]["best_step"]} if config.keep_best else set()
    run.writer.prune(config.keep, {run.checkpoints / f"step_{best}" for best in bests if best} | run.uploads.in_use())


def finish(run: Run) -> None:
    """Make up for an export or upload that a run broke off before, and say that all is done."""
    checkpoint, final = run.checkpoints / f"step_{run.state.step}", run.output_dir / "export" / "final"
    if run.config.checkpoint.export != "none":
        if on_rank_zero(lambda: is_older(final / "config.json", checkpoint / MARKER)):
            export(run, final, last=True)
        run.uploads.add(final, last=True)
    run.uploads.add(checkpoint, last=True)
    run.progress.say(run.memory.report())
    run.progress.say(f"finished at step {run.state.step}; everything is in {run.output_dir}")


def is_older(path: Path, other: Path) -> bool:
    """Whether `path` is missing, or was written before `other`, which may be missing too."""
    return not path.exists() or (other.exists() and path.stat().st_mtime < other.stat().st_mtime)


def export(run: Run, output: Path, *, last: bool) -> None:
    """Write the policy as a Hugging Face folder, in place of an older one of this run, and upload it."""
    config = run.config.checkpoint
    dtype = run.config.train.precision if config.export_dtype == "auto" else config.export_dtype
    on_rank_zero(lambda: replace_folder(output))
    with run.watchdog.phase("export"), run.progress.phase("exporting"):
        export_engine(
            run.engine,
            run.model_path,
            output,
            run.world,
            dtype=dtype,
            max_shard_size=config.max_shard_size,
            run=run.output_dir,
            step=run.state.step,
        )
    run.uploads.add(output, last=last)


def replace_folder(output: Path) -> None:
    """Delete an older export."""
    with as_save_error(output):
        delete_folder(output)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
