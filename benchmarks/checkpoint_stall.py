"""Time that training waits for a checkpoint written in the background, relative to one written in the foreground.

    python benchmarks/checkpoint_stall.py [--gib 1.0] [--rounds 5] [--nproc 1]

The model is a stack of linear layers under ZeRO-3 whose checkpoint has at least `--gib` GiB. Each round measures a save for
which training waits, with files flushed to disk; a background save, whose stall is the time until `start` returns; steps during
the background save; and steps without a save. The first background save is reported separately, because it has to allocate
memory for its copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsreason.job.ranks import World

GOAL = 0.10


def build_linear_engine(gib: float):
    """Build an engine whose checkpoint has about `gib` GiB: 12 bytes per parameter (fp32 weights and two moments)."""
    import torch
    from torch import nn

    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine

    width, layers = 2048, max(1, round(gib * 2**30 / 12 / 2048**2))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    return build_engine(model, OptimConfig(lr=1e-4), config), width


def run_step(engine, width: int) -> float:
    import torch

    started = time.perf_counter()
    loss = engine(torch.ones(16, width, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    loss.item()  # waits for the GPU, on which the work above is only queued
    return time.perf_counter() - started


def measure(folder: Path, gib: float, rounds: int, world: World) -> tuple[dict[str, list[float]], int]:
    """Measure saves and steps in `rounds` + 1 rounds, the first of which is a warm-up. Collective.

    Returns:
        The seconds of each measurement (name → one number per round or step), and a checkpoint's size in bytes.
    """
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.checkpoint_writer import CheckpointWriter

    engine, width = build_linear_engine(gib)
    waiting = CheckpointWriter(engine, folder / "waiting", world, background=False)
    background = CheckpointWriter(engine, folder / "beside", world)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("waited", "stall", "written", "step alone", "step meanwhile")
    }
    for number in range(rounds + 1):
        seconds["step alone"] += [run_step(engine, width) for _ in range(3)]
        started = time.perf_counter()
        waiting.start(number, TrainerState(step=number))
        path = waiting.wait()
        seconds["waited"].append(time.perf_counter() - started)
        size = sum(file.stat().st_size for file in path.iterdir())
        started = time.perf_counter()
        background.start(number, TrainerState(step=number))
        seconds["stall"].append(time.perf_counter() - started)
        while background.poll() is None:
            seconds["step meanwhile"].append(run_step(engine, width))
        seconds["written"].append(time.perf_counter() - started)
        if world.is_main:
            for saves in (folder / "waiting", folder / "beside"):
                shutil.rmtree(saves / f"step_{number}")
    return seconds, size


def compute_medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return each measurement's median over all values but the first; the first round has to allocate memory for the copy."""
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def run_rank(arguments: argparse.Namespace) -> None:
    from dsreason.job.ranks import init_world

    world = init_world()
    seconds_by_name, size = measure(Path(arguments.folder), arguments.gib, arguments.rounds, world)
    if world.is_main:
        print(f"{size / 2**30:.2f} GiB per checkpoint, {world.size} ranks, load {os.getloadavg()[0]:.1f}")
        print(f"first background save, memory for the copy included: {seconds_by_name['stall'][0]:.3f} s")
        typical = compute_medians(seconds_by_name)
        for name, seconds in typical.items():
            print(f"{name:16}{seconds:8.3f} s")
        print(f"step while a checkpoint is written / alone: {typical['step meanwhile'] / typical['step alone']:.2f}")
        print(f"stall / save that training waits for: {typical['stall'] / typical['waited']:.3f} (goal {GOAL})")


def start(script: str, description: str | None, measure_on_rank: Callable[[argparse.Namespace], None]) -> None:
    """Parse the options, start the ranks, each of which runs `script`, and call `measure_on_rank` with the options on each."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--folder", help="folder to write to; default: a temporary folder")
    arguments = parser.parse_args()
    from dsreason.job import launch

    if launch.is_rank():
        launch.enter_rank()
        measure_on_rank(arguments)
        return
    launch.prepare_environment()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        command = [script, f"--gib={arguments.gib}", f"--rounds={arguments.rounds}", f"--folder={folder}"]
        launch.start_ranks(lambda attempt: command, ranks=arguments.nproc, log_dir=Path(folder) / "logs")


if __name__ == "__main__":
    start(__file__, __doc__, run_rank)
