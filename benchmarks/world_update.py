"""Time of a Flow-GRPO update that trains on a window of steps, relative to training on all steps of the rollout.

    python benchmarks/world_update.py [--ds-config zero3.json] [--steps 10] [--window 2] [--rounds 3] [--checkpointing]

The model is a random Cosmos-Predict2.5 transformer that is large enough for its matrix products to take most of the time, on one
rank and one thread; every weight is trained. The sides take turns in one run: a rollout with rewards, then its update (forward
and backward of the trained steps, optimizer step). The output is the median seconds, in wall-clock and CPU time, and the ratio
of CPU times, for the update and for the entire step.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from world_sampling import run_on_one_rank, time_call

if TYPE_CHECKING:  # nothing may import torch before `launch.prepare_environment` runs
    from dsreason.world.training.build import WorldTrainer

GOAL = 0.25
SIDES = ("window", "all steps")
PARTS = ("rollout", "update", "step")


def measure(trainer: WorldTrainer, arguments: argparse.Namespace) -> None:
    from dsreason.world.training.loop import prepare_parts, train_on_part

    maker, step = trainer.clip_maker, trainer.run.state.step + 1
    windowed = maker.config
    all_steps = windowed.model_copy(update={"world": windowed.world.model_copy(update={"window": 0})})
    rounds: dict[str, list[list[tuple[float, float]]]] = {side: [] for side in SIDES}
    trained = dict(zip(SIDES, (arguments.window, arguments.steps), strict=True))
    for number in range(arguments.rounds + 1):
        for side, config in zip(SIDES, (windowed, all_steps), strict=True):
            trainer.clip_maker = replace(maker, config=config)
            wall, cpu, ((part,), _) = time_call(lambda: prepare_parts(trainer))
            assert {len(sample.trajectory) for sample in part} == {trained[side]}
            update_wall, update_cpu, _ = time_call(lambda part=part: train_on_part(trainer, part, step))
            if number:  # the first round is a warm-up
                times = [(wall, cpu), (update_wall, update_cpu), (wall + update_wall, cpu + update_cpu)]
                rounds[side].append(times)
    print(f"load {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds")
    cpu = {side: [statistics.median(row[i][1] for row in rows) for i in range(3)] for side, rows in rounds.items()}
    wall = {side: [statistics.median(row[i][0] for row in rows) for i in range(3)] for side, rows in rounds.items()}
    print(f"{'':10}" + "".join(f"{side:>20}" for side in SIDES) + f"{'ratio (CPU time)':>20}")
    for i, part in enumerate(PARTS):
        seconds = "".join(f"{wall[side][i]:10.2f} s{cpu[side][i]:7.2f}c" for side in SIDES)
        goal = f"  (goal {GOAL})" if part == "update" else ""
        print(f"{part:10}{seconds}{cpu[SIDES[0]][i] / cpu[SIDES[1]][i]:20.3f}{goal}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds-config", default="zero3.json")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--side", type=int, default=96, help="height and width of a clip, in pixels")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, as in the recipes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    world = {
        "sampling_steps": arguments.steps,
        "window": arguments.window,
        "prompts_per_step": arguments.prompts,
        "num_generations": arguments.generations,
    }
    run_on_one_rank(
        __file__,
        arguments,
        measure,
        world=world,
        train={"micro_batch_size": arguments.batch},
        model={"gradient_checkpointing": arguments.checkpointing},
    )


if __name__ == "__main__":
    main()
