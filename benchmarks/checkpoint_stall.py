"""How long training waits for a checkpoint that is written beside it, against one that it waits for; and steps meanwhile.

    python benchmarks/checkpoint_stall.py [--gib 1.0] [--rounds 5] [--nproc 1]

A plain stack of linear layers under ZeRO-3 whose checkpoint has at least `--gib` GiB. In turn: a save that training waits for,
files flushed to disk; a save beside training, whose stall is the time until `start` returns; steps while it is being written,
and steps without. The first save beside training, which has to get memory for its copy, is told apart.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsreason.job.ranks import World

GOAL = 0.10


def build(gib: float):
    """An engine whose checkpoint has about `gib` GiB: 12 bytes a parameter (fp32 weights and two moments)."""
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


def step(engine, width: int) -> float:
    import torch

    started = time.perf_counter()
    loss = engine(torch.ones(16, width, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    loss.item()  # on a GPU the above is only queued
    return time.perf_counter() - started


def measure(folder: Path, gib: float, rounds: int, world: World) -> tuple[dict[str, list[float]], int]:
    """Seconds by what was waited for, the first round apart from the others, and the bytes of a checkpoint. Collective."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.checkpoint_writer import CheckpointWriter

    engine, width = build(gib)
    waiting = CheckpointWriter(engine, folder / "waiting", world, background=False)
    beside = CheckpointWriter(engine, folder / "beside", world)
    found: dict[str, list[float]] = {
        name: [] for name in ("waited", "stall", "written", "step alone", "step meanwhile")
    }
    for number in range(rounds + 1):
        found["step alone"] += [step(engine, width) for _ in range(3)]
        started = time.perf_counter()
        waiting.start(number, TrainerState(step=number))
        path = waiting.wait()
        found["waited"].append(time.perf_counter() - started)
        size = sum(file.stat().st_size for file in path.iterdir())
        started = time.perf_counter()
        beside.start(number, TrainerState(step=number))
        found["stall"].append(time.perf_counter() - started)
        while beside.poll() is None:
            found["step meanwhile"].append(step(engine, width))
        found["written"].append(time.perf_counter() - started)
        if world.is_main:
            for folder_of in (folder / "waiting", folder / "beside"):
                shutil.rmtree(folder_of / f"step_{number}")
    return found, size


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """Without the first round, which has to get memory for the copy."""
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def rank(arguments: argparse.Namespace) -> None:
    from dsreason.job.ranks import init_world

    world = init_world()
    found, size = measure(Path(arguments.folder), arguments.gib, arguments.rounds, world)
    if world.is_main:
        print(f"{size / 2**30:.2f} GiB a checkpoint, {world.size} ranks, load {os.getloadavg()[0]:.1f}")
        print(f"first save beside training, memory for the copy included: {found['stall'][0]:.3f} s")
        middle = medians(found)
        for name, seconds in middle.items():
            print(f"{name:16}{seconds:8.3f} s")
        print(f"step while a checkpoint is written / alone: {middle['step meanwhile'] / middle['step alone']:.2f}")
        print(f"stall / save that training waits for: {middle['stall'] / middle['waited']:.3f} (goal {GOAL})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    from dsreason.job import launch

    if launch.is_rank():
        launch.enter_rank()
        rank(arguments)
        return
    launch.prepare_environment()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        given = [__file__, f"--gib={arguments.gib}", f"--rounds={arguments.rounds}", f"--folder={folder}"]
        launch.start_ranks(lambda attempt: given, ranks=arguments.nproc, log_dir=Path(folder) / "logs")


if __name__ == "__main__":
    sys.exit(main())
