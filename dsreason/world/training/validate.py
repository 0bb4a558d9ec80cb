"""Validation: clips of the same prompts from the same noise, all through a run, with their rewards; and the loss on clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsreason.files.step_names import step_name
from dsreason.job.ranks import World, errors_on_all_ranks, gather_objects
from dsreason.monitor.metrics import Metrics
from dsreason.train.common.answers import write_rows
from dsreason.world.data import WorldDataset
from dsreason.world.evaluation.history import small_video, write_run_page
from dsreason.world.families.components import load_scheduler
from dsreason.world.rewards import Scores
from dsreason.world.sampler import sample, solve
from dsreason.world.steps import step_of
from dsreason.world.training.build import WorldRun
from dsreason.world.training.clips import MicroBatch, Place, share_out
from dsreason.world.training.inputs import loss_rows, validation_rows
from dsreason.world.training.preflight import sigmas_of
from dsreason.world.training.rollout import ask, pixels_of
from dsreason.world.training.sft import held_out_loss
from dsreason.world.training.show import Look, look_at, looks
from dsreason.world.training.velocity import ClipMaker, velocity_of, with_given
from dsreason.world.types import WorldRow
from dsreason.world.video import Pixels, gif, small, write_mp4


@dataclass(frozen=True)
class Shown:
    """A sampled clip of a held-out prompt."""

    number: int
    row: WorldRow
    rewards: dict[str, float]
    """By name, and under "" their weighted sum; empty where the run has no rewards."""
    look: Look
    pixels: Pixels | None
    """`[3, T, H, W]`, of those that are shown."""


@dataclass(frozen=True)
class WorldResult:
    """Equal on all ranks."""

    metrics: dict[str, float]
    clips: list[Shown]
    fps: float

    def summary(self, step: int) -> str:
        """`validation at step 60: loss 0.1234, reward 0.8125, brightness 0.21`."""
        shown = {"loss": "val/loss", "reward": "val/reward/mean", "brightness": "val/brightness"}
        texts = [f"{name} {self.metrics[key]:.4f}" for name, key in shown.items() if key in self.metrics]
        return f"validation at step {step}: {', '.join(texts)}"

    def write(self, output_dir: Path, step: int, metrics: Metrics, world: World) -> None:
        """`validation/step_N.jsonl` with all rewards, in `validation/step_N/` the clips that are shown, and the run's page;
        rank 0 does it."""
        if not world.is_main or not self.clips:
            return
        folder = output_dir / "validation"
        rows = [{"id": c.row.id, "prompt": c.row.prompt, "rewards": c.rewards, **c.look.facts} for c in self.clips]
        write_rows(folder / f"{step_name(step)}.jsonl", rows)
        for clip in self.clips:
            if clip.pixels is not None:
                self.show(clip.number, clip.pixels, folder / step_name(step), step, metrics)
        write_run_page(output_dir)

    def show(self, number: int, pixels: Pixels, folder: Path, step: int, metrics: Metrics) -> None:
        """A clip as it is, a small one for the page, and an animated picture for TensorBoard."""
        write_mp4(pixels, folder / f"{number}.mp4", self.fps)
        write_mp4(small(pixels), small_video(folder, number), self.fps)
        metrics.log_video(step, f"clips/{number}", gif(small(pixels), self.fps))


def validate(world: WorldRun) -> WorldResult | None:
    """Sample the validation prompts and measure the held-out clips, with the averaged weights where there are any.

    None where the configuration leaves nothing to measure. Collective.
    """
    metrics: dict[str, float] = {}
    clips: list[Shown] = []
    rows = validation_rows(world.config, (world.training, world.validation))
    with averaged(world):
        if loss_rows(world.config, world.validation):
            with world.progress.phase("validation: loss"):
                loss = held_out_loss(world)
            if loss is not None:
                metrics["val/loss"] = loss
        if rows:
            with world.progress.phase("validation: clips", len(rows), "clips") as advance:
                clips = sample_clips(world, validation_data(world, rows), range(len(rows)), advance)
    if clips:
        metrics |= summarise(clips)
    return WorldResult(metrics, clips, world.size.fps) if metrics else None


def validation_data(world: WorldRun, rows: Sequence[WorldRow]) -> WorldDataset:
    source = world.validation if len(world.validation) else world.training
    return WorldDataset(rows, source.read)


@contextmanager
def averaged(world: WorldRun) -> Iterator[None]:
    average = world.averages.get("ema")
    if average is None:
        yield
        return
    with average.in_place():
        yield


@torch.no_grad()
def sample_clips(
    world: ClipMaker, dataset: WorldDataset, numbers: Sequence[int], advance: Callable[[int], object]
) -> list[Shown]:
    """A clip of each of these rows from noise that never changes, along the ODE. Collective."""
    places = [Place(number, 0) for number in numbers]
    groups = share_out(places, world.share, world.config.train.micro_batch_size)
    with errors_on_all_ranks():
        batches = world.inputs.micro_batches(groups, dataset, range(len(dataset)), 0, with_clean=False)
    found: list[tuple[MicroBatch, Tensor, Callable[[], Scores] | None, list[Look]]] = []
    for batch in batches:
        latents = solve_ode(world, batch.to(world.device))
        if batch.counted and world.share.leads:
            result, seen = (
                (None, look_at(pixels_of(world, latents))) if world.scorer is None else ask(world, batch, latents)
            )
            found.append((batch, latents.cpu(), result, seen))
        advance(len(batch) * world.share.count if batch.counted else 0)
    with errors_on_all_ranks():
        own = [one for item in found for one in shown_of(world, *item)]
    return sorted((one for part in gather_objects(own) for one in part), key=lambda one: one.number)


def solve_ode(world: ClipMaker, batch: MicroBatch) -> Tensor:
    """Latents of a micro-batch: by the model's own solver on its own schedule, by Euler steps on the linear one."""
    config = world.config
    steps = config.validation.sampling_steps or config.world.sampling_steps
    scale = config.validation.guidance_scale or config.world.guidance_scale
    velocity = velocity_of(world, batch, scale)
    if config.world.schedule == "family":
        scheduler = load_scheduler(world.model_path)
        return with_given(solve(velocity, batch.start, scheduler, steps, world.family.solver_times), batch)
    levels = sigmas_of(config, world.model_path, steps)
    euler = [step_of("ode", float(s), float(s_next)) for s, s_next in zip(levels, levels[1:], strict=False)]
    return with_given(sample(velocity, batch.start, levels, euler, no_noise, ()).latents, batch)


def no_noise(number: int) -> Tensor:
    raise ValueError(f"step {number} of an ODE has no noise")


def shown_of(
    world: ClipMaker, batch: MicroBatch, latents: Tensor, result: Callable[[], Scores] | None, seen: Sequence[Look]
) -> list[Shown]:
    scores = None if result is None else result()
    found = []
    for i, (place, row) in enumerate(zip(batch.places, batch.rows, strict=True)):
        rewards: dict[str, float] = {}
        if scores is not None:
            rewards = {"": float(scores.total[i]), **{name: float(v[i]) for name, v in scores.by_name.items()}}
        show = place.prompt < world.config.validation.show
        pixels = pixels_of(world, latents[i : i + 1])[0].cpu().numpy() if show else None
        found.append(Shown(place.prompt, row, rewards, seen[i], pixels))
    return found


def summarise(clips: Sequence[Shown]) -> dict[str, float]:
    """`val/reward/mean`, `val/reward/<name>/mean`, and what the clips look like."""
    found = {
        f"val/reward/{name}/mean".replace("//", "/"): sum(clip.rewards[name] for clip in clips) / len(clips)
        for name in clips[0].rewards
    }
    return found | looks([[clip.look for clip in clips]], "val")
