"""Validation: rewards for clips sampled from the same prompts and noise throughout a run, and the loss on real clips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsreason.engine.average import WeightAverage
from dsreason.files.step_names import format_step
from dsreason.job.ranks import World, gather_objects, share_errors
from dsreason.monitor.metrics import Metrics
from dsreason.monitor.progress import Progress
from dsreason.train.common.answers import write_rows
from dsreason.world.data import WorldDataset
from dsreason.world.evaluation.history import locate_small_video, write_run_page
from dsreason.world.families.components import load_scheduler
from dsreason.world.noise import compute_sigmas
from dsreason.world.rewards.scorer import ClipScores
from dsreason.world.sampler import sample, solve
from dsreason.world.steps import build_step
from dsreason.world.training.clips import ClipIndex, ClipMicroBatch, group_local_clips
from dsreason.world.training.inputs import list_loss_rows, list_validation_rows
from dsreason.world.training.rollout import decode_pixels, start_scoring
from dsreason.world.training.sft import measure_held_out_loss
from dsreason.world.training.show import Look, average_looks, look_at
from dsreason.world.training.velocity import ClipMaker, build_velocity, restore_given_frames
from dsreason.world.types import WorldRow
from dsreason.world.video import Pixels, encode_gif, shrink, write_mp4


@dataclass(frozen=True)
class SampledBatch:
    """A micro-batch sampled for validation, whose rewards may still be pending."""

    batch: ClipMicroBatch
    latents: Tensor
    """Latents of the sampled clips: `[B, C, T, h, w]`, on the CPU."""
    result: Callable[[], ClipScores] | None
    """Waits for the scores and returns them; None if the run has no rewards."""
    looks: list[Look]


@dataclass(frozen=True)
class ValidationClip:
    """A clip sampled for a validation prompt."""

    number: int
    row: WorldRow
    rewards: dict[str, float]
    """Reward name → value, with the weighted sum under ""; empty if the run has no rewards."""
    look: Look
    pixels: Pixels | None
    """Pixels, `[3, T, H, W]`; None if the clip will not be shown."""


@dataclass(frozen=True)
class WorldResult:
    """A validation's result, which is the same on all ranks."""

    metrics: dict[str, float]
    clips: list[ValidationClip]
    fps: float

    def summary(self, step: int) -> str:
        """Return the log message, such as `validation at step 60: loss 0.1234, reward 0.8125, brightness 0.2100`."""
        summary_keys = {"loss": "val/loss", "reward": "val/reward/mean", "brightness": "val/brightness"}
        texts = [f"{name} {self.metrics[key]:.4f}" for name, key in summary_keys.items() if key in self.metrics]
        return f"validation at step {step}: {', '.join(texts)}"

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """Write all rewards to `validation/step_N.jsonl`, the clips to show to `validation/step_N/`, and the run's HTML page.

        Only rank 0 writes.
        """
        if not world.is_main or not self.clips:
            return
        folder = output_dir / "validation"
        rows = [{"id": c.row.id, "prompt": c.row.prompt, "rewards": c.rewards, **c.look.facts} for c in self.clips]
        write_rows(folder / f"{format_step(step)}.jsonl", rows)
        for clip in self.clips:
            if clip.pixels is not None:
                self.write_clip(clip.number, clip.pixels, folder / format_step(step), step, metrics)
        write_run_page(output_dir)

    def write_clip(self, number: int, pixels: Pixels, folder: Path, step: int, metrics: Metrics) -> None:
        """Write the original clip and a small one for the page, and log an animated GIF to TensorBoard."""
        write_mp4(pixels, folder / f"{number}.mp4", self.fps)
        write_mp4(shrink(pixels), locate_small_video(folder, number), self.fps)
        metrics.log_video(step, f"clips/{number}", encode_gif(shrink(pixels), self.fps))


def validate(
    maker: ClipMaker,
    datasets: tuple[WorldDataset, WorldDataset],
    average: WeightAverage | None,
    progress: Progress,
) -> WorldResult | None:
    """Sample clips for the validation prompts, and measure the loss on held-out clips. Collective.

    Args:
        datasets: training and validation data sets.
        average: averaged weights to validate; None validates the policy's current weights.

    Returns:
        The metrics and clips; None if there is nothing to measure.
    """
    config, (_, validation) = maker.config, datasets
    metrics: dict[str, float] = {}
    clips: list[ValidationClip] = []
    rows = list_validation_rows(config, datasets)
    with nullcontext() if average is None else average.in_place():
        if list_loss_rows(config, validation):
            with progress.track_phase("validation: loss"):
                loss = measure_held_out_loss(maker, validation)
            if loss is not None:
                metrics["val/loss"] = loss
        if rows:
            with progress.track_phase("validation: clips", len(rows), "clips") as advance:
                clips = sample_clips(maker, build_validation_dataset(rows, datasets), range(len(rows)), advance)
    if clips:
        metrics |= summarise(clips)
    return WorldResult(metrics, clips, maker.inputs.size.fps) if metrics else None


def build_validation_dataset(rows: Sequence[WorldRow], datasets: tuple[WorldDataset, WorldDataset]) -> WorldDataset:
    """Build a data set of the rows whose prompts are used to sample clips; see `list_validation_rows`."""
    training, validation = datasets
    source = validation if len(validation) else training
    return WorldDataset(rows, source.read)


@torch.no_grad()
def sample_clips(
    maker: ClipMaker, dataset: WorldDataset, numbers: Sequence[int], advance: Callable[[int], object]
) -> list[ValidationClip]:
    """Sample a clip for each row in `numbers` by solving the ODE. A row's noise is the same in every call. Collective."""
    share, places = maker.share, [ClipIndex(number, 0) for number in numbers]
    groups = group_local_clips(places, share, maker.config.train.micro_batch_size)
    with share_errors():
        batches = maker.inputs.build_micro_batches(groups, dataset, range(len(dataset)), 0, with_clean=False)
    sampled: list[SampledBatch] = []
    for batch in batches:
        latents = solve_ode(maker, batch.to(maker.device))
        if batch.counted and share.leads:
            sampled.append(measure_and_score(maker, batch, latents))
        advance(len(batch) * share.count if batch.counted else 0)
    with share_errors():
        local_clips = [clip for item in sampled for clip in build_clips(maker, item)]
    return sorted((clip for part in gather_objects(local_clips) for clip in part), key=lambda clip: clip.number)


def solve_ode(maker: ClipMaker, batch: ClipMicroBatch) -> Tensor:
    """Sample a micro-batch's latents, using the model's solver for the family's schedule, or Euler steps for the linear one."""
    config = maker.config
    steps = config.validation.sampling_steps or config.world.sampling_steps
    scale = config.validation.guidance_scale or config.world.guidance_scale
    velocity = build_velocity(maker, batch, scale)
    if config.world.schedule == "family":
        scheduler = load_scheduler(maker.model_path)
        latents = solve(velocity, batch.start, scheduler, steps, maker.family.solver_times)
    else:
        levels = compute_sigmas(config, maker.model_path, steps)
        euler = [build_step("ode", float(s), float(s_next)) for s, s_next in zip(levels, levels[1:], strict=False)]
        latents = sample(velocity, batch.start, levels, euler, refuse_noise, ()).latents
    return restore_given_frames(latents, batch)


def refuse_noise(number: int) -> Tensor:
    raise ValueError(f"step {number} follows the ODE, so it must not draw noise")


def measure_and_score(maker: ClipMaker, batch: ClipMicroBatch, latents: Tensor) -> SampledBatch:
    """Compute the clips' visual metrics; if the run has rewards, start scoring the clips."""
    if maker.scorer is None:
        return SampledBatch(batch, latents.cpu(), None, look_at(decode_pixels(maker.codec, latents)))
    pending = start_scoring(maker, batch, latents)
    return SampledBatch(batch, latents.cpu(), pending.result, pending.looks)


def build_clips(maker: ClipMaker, sampled: SampledBatch) -> list[ValidationClip]:
    """Wait for a micro-batch's scores, decode the clips that will be shown, and return the results."""
    scores = None if sampled.result is None else sampled.result()
    clips = []
    for i, (place, row) in enumerate(zip(sampled.batch.places, sampled.batch.rows, strict=True)):
        rewards: dict[str, float] = {}
        if scores is not None:
            rewards = {"": float(scores.total[i]), **{name: float(v[i]) for name, v in scores.by_name.items()}}
        is_shown = place.prompt < maker.config.validation.show
        pixels = decode_pixels(maker.codec, sampled.latents[i : i + 1])[0].cpu().numpy() if is_shown else None
        clips.append(ValidationClip(place.prompt, row, rewards, sampled.looks[i], pixels))
    return clips


def summarise(clips: Sequence[ValidationClip]) -> dict[str, float]:
    """Return `val/reward/mean`, `val/reward/<name>/mean`, and metrics of how the clips look."""
    metrics = {
        f"val/reward/{name}/mean".replace("//", "/"): sum(clip.rewards[name] for clip in clips) / len(clips)
        for name in clips[0].rewards
    }
    return metrics | average_looks([[clip.look for clip in clips]], "val")
