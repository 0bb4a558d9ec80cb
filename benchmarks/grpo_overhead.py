"""Time of a GRPO step by phase: generate, forward, backward, and everything else.

    python benchmarks/grpo_overhead.py [--nproc 2] [--engine vllm] [--ds-config zero3.json] [--steps 6] [--profile 25]

The loop of `dsreason grpo` trains a random model on image rows, with clocks around its calls; the model is large enough for
generate, forward and backward to take seconds. `--profile` also runs the loop under cProfile and prints the functions that took
the most time. A step lasts from the end of the previous step to its own end; the time that no clock covers is `other`. The
output contains rank 0's means over the steps after the warm-up: `work` is generate, forward and backward, and `apart` is the
optimizer step and the weight sync. Time spent waiting for another rank counts towards the phase that waits. No completion ends
early, and nothing is saved or validated.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from grpo_vs_trl import REWARD, build_endless
from sides import add_size, write_rows

from dsreason.job import launch

if TYPE_CHECKING:
    from dsreason.train.grpo.build import GRPOTrainer

GOAL = 0.1
WORK = ("generate", "forward", "backward")
APART = ("optimizer step", "sync")

Seconds = np.ndarray[Any, np.dtype[np.float64]]
"""Wall-clock seconds and CPU seconds."""


class PhaseClock:
    """A clock that measures each phase's wall-clock time and this process's CPU time, step by step; phases do not nest."""

    def __init__(self) -> None:
        self.now: dict[str, Seconds] = defaultdict(lambda: np.zeros(2))
        self.steps: list[dict[str, Seconds]] = []
        self.ended = read_clocks()

    def add_clock(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_timed(*args: Any, **kwargs: Any) -> Any:
            started = read_clocks()
            try:
                return call(*args, **kwargs)
            finally:
                self.now[phase] += read_clocks() - started

        return call_timed

    def wrap(self, owner: Any, **phases: str) -> None:
        """Put a clock around each of `owner`'s methods that `phases` maps to a phase."""
        for name, phase in phases.items():
            setattr(owner, name, self.add_clock(phase, getattr(owner, name)))

    def end_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_end_step(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            ended = read_clocks()
            self.steps.append({**self.now, "total": ended - self.ended})
            self.ended = ended
            self.now.clear()
            return result

        return call_and_end_step


def read_clocks() -> Seconds:
    return np.array([time.perf_counter(), time.process_time()])


def watch(trainer: GRPOTrainer) -> PhaseClock:
    """Put clocks around the calls that the training loop makes."""
    from dsreason.train.grpo import loop as grpo

    clock = PhaseClock()
    clock.wrap(trainer.engine, forward="forward", backward="backward", step="optimizer step")
    clock.wrap(trainer.sampler.rollout, generate="generate", sync="sync")
    clock.wrap(trainer.scorer, score="scoring")
    clock.wrap(grpo, cut="collation", show_rollouts="recording", finish_step="recording")
    trainer.rollouts.loader = Waiting(trainer.rollouts.loader, clock)
    grpo.finish_step = clock.end_step(grpo.finish_step)
    return clock


class Waiting:
    """An iterator that counts the time spent waiting for items as the phase `prompts`."""

    def __init__(self, items: Iterator[Any], clock: PhaseClock) -> None:
        self.take = clock.add_clock("prompts", items.__next__)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.take()


def run_rank(arguments: argparse.Namespace) -> None:
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.train.grpo.build import build_grpo
    from dsreason.train.grpo.loop import train

    folder = arguments.folder
    config = GRPOConfig.model_validate(json.loads((folder / "run.json").read_text()))
    with build_grpo(config, folder / "run", None) as trainer:
        clock, profiler = watch(trainer), cProfile.Profile()
        if arguments.profile:
            profiler.runcall(train, trainer)
        else:
            train(trainer)
        world = trainer.job.world
        if world.is_main:
            report(clock.steps[arguments.warmup :], world.size)
            if arguments.profile:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(arguments.profile)


def report(steps: list[dict[str, Seconds]], num_ranks: int) -> None:
    mean = {phase: sum(step.get(phase, 0.0) for step in steps) / len(steps) for phase in set().union(*steps)}
    total = mean.pop("total")
    mean["other"] = total - sum(mean.values())
    remaining = [phase for phase in sorted(mean, key=lambda phase: -mean[phase][0]) if phase not in WORK + APART]
    print(f"{num_ranks} ranks, {len(steps)} steps; load {os.getloadavg()[0]:.1f}")
    rows = [(phase, mean[phase]) for phase in (*WORK, *APART, *remaining)]
    for name, phases in (("work", WORK), ("apart", APART), ("the rest", remaining)):
        rows.append((name, sum(mean[phase] for phase in phases)))
    print(f"{'':16}{'wall s':>9}{'':9}{'CPU s':>9}")
    for phase, (wall, cpu) in (*rows, ("step", total)):
        print(f"{phase:16}{wall:9.3f}{wall / total[0]:9.1%}{cpu:9.3f}{cpu / total[1]:9.1%}")
    wall, cpu = rows[-1][1] / total
    print(f"share of a step that is the rest: {wall:.1%} of the time, {cpu:.1%} of the CPU time (goal {GOAL:.0%})")


def build_run_config(arguments: argparse.Namespace, folder: Path, model: Path, rows: Path) -> dict[str, Any]:
    return {
        "deepspeed": arguments.ds_config,
        "model": {"path": str(model), "gradient_checkpointing": False, "max_length": 512},
        "data": {"adapter": "jsonl", "path": str(rows), "workers": 1},
        "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant"},
        "train": {
            "precision": "fp32",
            "epochs": 1000,
            "max_steps": arguments.warmup + arguments.steps,
            "micro_batch_size": arguments.micro_batch,
        },
        "grpo": {"prompts_per_step": arguments.prompts, "num_generations": arguments.generations, "kl_coef": 0.0},
        "rollout": {"engine": arguments.engine, "max_completion_length": arguments.length},
        "reward": {"functions": {f"{folder / 'rewards.py'}:chance": 1.0}},
        "validation": {"before_training": False, "generate": False, "micro_batch_size": 64},
        "checkpoint": {"every": 0, "export": "none"},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_size(parser)
    parser.set_defaults(hidden=512, vocabulary=512)
    parser.add_argument("--ds-config", default="zero3.json")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step, on all ranks together")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens per completion")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if launch.is_rank():
        launch.enter_rank()
        run_rank(arguments)
        return
    launch.prepare_environment()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = build_endless(arguments, folder / "model")
        rows = write_rows(folder, [8 * (1 + i % 4) for i in range(64)], [4] * 64)
        (folder / "rewards.py").write_text(REWARD)
        (folder / "run.json").write_text(json.dumps(build_run_config(arguments, folder, model, rows)))
        command = [__file__, *sys.argv[1:], f"--folder={folder}"]
        launch.start_ranks(lambda attempt: command, ranks=arguments.nproc, log_dir=folder / "logs")


if __name__ == "__main__":
    main()
