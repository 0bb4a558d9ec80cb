"""Parts that the comparisons with TRL share: rows, model, and a timed process for each side."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

JUDGED = {"hidden": 1024, "layers": 8, "vocabulary": 151_936}
"""Sizes to which the goals apply: matrix products dominate, and the vocabulary is as large as a real model's."""
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "yellow": (220, 220, 30)}
WORDS = (
    "yes",
    "no",
    "left",
    "right",
    "up",
    "down",
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
)
"""Words that consist of one token each."""
Ends = dict[int, tuple[float, float]]
"""Step → time at which it ended, as wall-clock time and as the process's CPU time."""


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl")
    parser.add_argument("--hidden", type=int, default=JUDGED["hidden"], help="hidden size of the random model")
    parser.add_argument("--layers", type=int, default=JUDGED["layers"])
    parser.add_argument("--vocabulary", type=int, default=JUDGED["vocabulary"])


def build_model(arguments: argparse.Namespace, folder: Path) -> Path:
    from dsreason.models.tiny import build_tiny

    sizes = {"hidden_size": arguments.hidden, "num_layers": arguments.layers, "vocabulary_size": arguments.vocabulary}
    return build_tiny(arguments.family, folder, **sizes)


def make_log_uniform_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """Return `count` lengths whose logarithms are evenly spaced, in a fixed random order."""
    lengths = np.geomspace(shortest, longest, count).round().astype(int)
    return [int(length) for length in np.random.default_rng(0).permutation(lengths)]


def make_words(count: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(count))


def write_rows(folder: Path, prompts: Sequence[int], answers: Sequence[int]) -> Path:
    """Write rows that each have a picture (56 to 168 pixels per side), a question and an answer.

    `prompts` and `answers` contain the number of tokens in each row's question and answer. The picture adds 4 to 36 tokens to
    a prompt, and the chat format adds a fixed number.
    """
    random = np.random.default_rng(0)
    rows = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        height, width = (int(size) for size in random.integers(56, 169, 2))
        pixels = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
        pixels[10:40, 10:40] = COLOURS[list(COLOURS)[i % len(COLOURS)]]
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append(
            {"id": str(i), "image": f"{i}.png", "question": make_words(prompt, i), "answer": make_words(answer, i)}
        )
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_side(program: str, task: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Run `program --side task` in a process pinned to one core per thread; return the JSON in the last line of its output."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    cores = sorted(os.sched_getaffinity(0))[
        -threads:
    ]  # no side may use more cores, regardless of what its launcher sets
    command = [sys.executable, program, "--side", json.dumps(task)]
    pin = partial(os.sched_setaffinity, 0, cores)
    completed = subprocess.run(command, check=False, env=environment, text=True, capture_output=True, preexec_fn=pin)
    if completed.returncode:
        sys.exit(f"{task}\nfailed with {completed.returncode}:\n{completed.stdout[-3000:]}\n{completed.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


def time_steps(report: Callable[[Ends], None] = lambda ends: None) -> Ends:
    """Return a dict to which every training step in this process adds its end; pass the dict to `report` after every step."""
    from dsreason.train.common.run import TrainingRun

    ends: Ends = {}
    show_step = TrainingRun.show_step

    def show_timed_step(run: Any, *args: Any, **options: Any) -> None:
        show_step(run, *args, **options)
        ends[run.state.step] = time.time(), time.process_time()
        report(ends)

    setattr(TrainingRun, "show_step", show_timed_step)  # noqa: B010 (mypy refuses the assignment)
    return ends


def time_calls(owner: Any, name: str) -> list[tuple[float, float]]:
    """Return a list to which each call of `owner`'s method `name` appends its wall-clock seconds and CPU seconds."""
    times: list[tuple[float, float]] = []
    call = getattr(owner, name)

    def call_timed(*args: Any, **options: Any) -> Any:
        started = time.time(), time.process_time()
        result = call(*args, **options)
        times.append((time.time() - started[0], time.process_time() - started[1]))
        return result

    setattr(owner, name, call_timed)
    return times


def build_trl_clock(ends: Ends) -> Any:
    """Build a callback for TRL's trainers that adds each step's end to `ends`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]  # untyped
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends[state.global_step] = time.time(), time.process_time()

    return Clock()


def score_trained_tokens_only() -> None:
    """Make TRL compute only the logits of trained tokens on a CPU, as it does on a GPU, instead of those of all tokens."""
    from trl.trainer import utils

    utils._use_triton = lambda device: True  # this function has no other effect in that module


def compute_seconds_per_step(result: Mapping[str, Any], warmup: int) -> tuple[float, float]:
    """Return the mean seconds per step after the warm-up: wall-clock time, and CPU time."""
    ends = {int(step): end for step, end in result["ends"].items()}
    last = max(ends)
    wall, cpu = ((ends[last][i] - ends[warmup][i]) / (last - warmup) for i in range(2))
    return wall, cpu


def report(
    seconds: Mapping[str, Sequence[tuple[float, float]]], amount: float, unit: str, base: str
) -> dict[str, tuple[float, float]]:
    """Print each side's median speed, and return its ratios to `base`'s speed: in wall-clock time, and in CPU time."""
    print(f"{unit:32}{'wall':>9}{f'/ {base}':>18}{'CPU':>9}{f'/ {base}':>18}")
    speeds = {
        side: [amount / statistics.median(times) for times in zip(*rounds, strict=True)]
        for side, rounds in seconds.items()
    }
    ratios = {side: (speed[0] / speeds[base][0], speed[1] / speeds[base][1]) for side, speed in speeds.items()}
    for side, (wall, cpu) in speeds.items():
        print(f"{side:32}{wall:9.4g}{ratios[side][0]:18.2f}{cpu:9.4g}{ratios[side][1]:18.2f}")
    return ratios
