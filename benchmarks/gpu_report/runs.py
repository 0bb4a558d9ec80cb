"""GRPO runs: agreement between trainer and engine, the phases of a step, memory leaks, and runs on several cards."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.commands import CommandRun, Running, read_metrics
from benchmarks.gpu_report.materials import (
    FAMILIES,
    build_grpo_settings,
    build_random_model,
    build_tiny_model,
    find_largest_size,
)
from benchmarks.gpu_report.parts import BenchmarkSetup, Value
from benchmarks.gpu_report.training import build_sft_settings, compute_speeds, run_sft_steps
from dsreason.job import launch

PHASES = ("offload", "wake", "sync", "generate", "sleep", "reload", "train")


# ---------------------------------------------------------------- parity and leaks: the command, on tiny models


def measure_parity(setup: BenchmarkSetup, *, precision: str) -> Iterator[tuple[str, Value]]:
    """Run two steps of `dsreason grpo` per family; the self-test stops a run if weights are lost."""
    for family in FAMILIES[:1] if setup.tiny else FAMILIES:
        run = run_tiny_grpo(setup, f"parity-{family}-{precision}", family, precision, steps=2)
        yield f"{family}: from start to the first step, s", run.seconds_to_first_step
        for key in sorted(name for name in run.steps[0] if name.startswith("mismatch/")):
            value = max(step[key] for step in run.steps if key in step)
            yield f"{family}: {key}", value
            if key.startswith("mismatch/kl"):  # the k3 estimate is half the squared difference if the latter is small
                yield f"{family}: {key.replace('kl', 'root_mean_square_logprob')}", math.sqrt(2 * value)


parity_bf16 = partial(measure_parity, precision="bf16")
parity_fp32 = partial(measure_parity, precision="fp32")


def leaks(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    count, (first, last), late = (4, (1, 2), 2) if setup.tiny else (20, (2, 8), 12)
    run = run_tiny_grpo(setup, "leaks", "qwen3_vl", "bf16", steps=count)
    for name in ("allocated", "device"):
        held = [step[f"memory/train/{name}_gib"] for step in run.steps if f"memory/train/{name}_gib" in step]
        if held:  # on a CPU, no driver reports the memory
            grown = max(held[late:]) - max(held[first:last])
            yield f"{name} after step {late} above steps {first} to {last}, MiB", 1024 * grown
    yield "lines with a CUDA error", sum("CUDA Error" in line for line in run.output.splitlines())
    yield "step, s", sum(step["time/rollout"] + step["time/train"] for step in run.steps[2:]) / (count - 2)
    yield "from start to end, s", run.seconds


def run_tiny_grpo(setup: BenchmarkSetup, name: str, family: str, precision: str, *, steps: int) -> CommandRun:
    tiny = replace(setup, tiny=True)
    model = build_tiny_model(setup, family, precision)
    settings = build_grpo_settings(tiny, model, prompts=6, generations=4, length=16, precision=precision)
    settings["train"]["max_steps"] = steps
    # The cache has a fixed size; otherwise, vLLM would measure the free memory, which parallel parts change.
    settings["rollout"] |= {"gpu_memory_utilization": 0.1, "engine_options": {"kv_cache_memory_bytes": 2**30}}
    return Running("grpo", settings, setup.scratch / name).finish()


# ---------------------------------------------------------------- one step with a realistically sized model


def grpo(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    output = setup.scratch / "grpo"
    for measurement in run_grpo_steps(build_real_grpo(setup), output, 2 if setup.tiny else 5):
        yield measurement
        yield from split(read_metrics(output))  # yields after each step, in case the time limit ends the part


def build_real_grpo(setup: BenchmarkSetup) -> dict[str, Any]:
    prompts, generations, length = (2, 2, 8) if setup.tiny else (16, 8, 256)
    model = build_random_model(setup, find_largest_size(setup))
    return build_grpo_settings(setup, model, prompts=prompts, generations=generations, length=length)


def run_grpo_steps(settings: dict[str, Any], output: Path, steps: int) -> Iterator[tuple[str, Value]]:
    """Start `dsreason grpo` and run its first steps, without the final checkpoint. Every rank of the job must call this."""
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.train.grpo.build import build_grpo
    from dsreason.train.grpo.loop import check_rollout_engine, train_on_rollout

    started = time.perf_counter()
    with build_grpo(GRPOConfig.model_validate(settings), output, None) as trainer:
        yield "policy and engine built, s", time.perf_counter() - started
        started = time.perf_counter()
        check_rollout_engine(trainer)
        yield "self-test, s", time.perf_counter() - started
        for number in range(steps):
            train_on_rollout(trainer)
            yield "steps", number + 1


def split(lines: list[dict[str, Any]]) -> Iterator[tuple[str, Value]]:
    """Yield means over all steps but the first; yield nothing before the second step. `other` is the time outside all phases."""
    steps = [line for line in lines if "train/loss" in line]
    late = steps[1:]
    if not late:
        return
    mean = {
        name: sum(step[name] for step in late) / len(late) for name in late[0] if all(name in step for step in late)
    }
    yield "first step, s", steps[0]["time/rollout"] + steps[0]["time/train"]
    total = mean["time/rollout"] + mean["time/train"]
    yield "step, s", total
    phase_seconds = {phase: mean[f"memory/{phase}/seconds"] for phase in PHASES}
    for phase, seconds in phase_seconds.items():
        yield f"{phase}, s", seconds
        yield f"{phase}, share of a step", seconds / total
    yield "wake + sync, s", phase_seconds["wake"] + phase_seconds["sync"]
    yield "other, share of a step", 1 - sum(phase_seconds.values()) / total
    yield "waiting for prompts, s", mean["time/data"]
    yield "waiting for rewards, s", mean["time/reward"]
    yield from ((name, mean[name]) for name in ("rollout/tokens_per_second", "perf/tokens_per_second", "mismatch/kl"))
    for name in ("memory/train/peak_gib", "memory/generate/device_gib", "memory/sleep/device_gib"):
        if name in mean:
            yield name, mean[name]


# ---------------------------------------------------------------- several cards


def cards_sft(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    ranks = setup.cards or 2
    settings = build_sft_settings(setup, find_largest_size(setup))
    settings["train"]["global_batch_size"] *= ranks
    yield "cards", ranks
    yield from compute_speeds(run_on_ranks("sft", settings, setup, ranks, 4 if setup.tiny else 10))


def cards_grpo(setup: BenchmarkSetup, *, tensor_parallel_size: int = 1) -> Iterator[tuple[str, Value]]:
    ranks = setup.cards or 2
    ranks -= ranks % tensor_parallel_size
    settings = build_real_grpo(setup)
    settings["grpo"]["prompts_per_step"] *= ranks
    settings["rollout"]["tensor_parallel_size"] = tensor_parallel_size
    yield "cards", ranks
    yield from split(run_on_ranks("grpo", settings, setup, ranks, 2 if setup.tiny else 4))


cards_grpo_tp2 = partial(cards_grpo, tensor_parallel_size=2)


def run_on_ranks(
    command: str, settings: dict[str, Any], setup: BenchmarkSetup, ranks: int, steps: int
) -> list[dict[str, Any]]:
    """Run the first steps of a job with `ranks` processes on this machine, and return its metrics."""
    folder = Path(tempfile.mkdtemp(dir=setup.scratch))
    task = json.dumps({"command": command, "settings": settings, "output": str(folder / "run"), "steps": steps})
    arguments = ["-m", "benchmarks.gpu_report.runs", task]
    launch.start_ranks(lambda attempt: arguments, ranks=ranks, log_dir=folder / "logs")
    return read_metrics(folder / "run")


def run_rank(task: str) -> None:
    launch.enter_rank()
    settings = json.loads(task)
    steps = {"sft": run_sft_steps, "grpo": run_grpo_steps}[settings["command"]]
    for _ in steps(settings["settings"], Path(settings["output"]), settings["steps"]):
        pass


if __name__ == "__main__":
    run_rank(sys.argv[1])
