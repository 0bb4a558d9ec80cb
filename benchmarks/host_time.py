"""CPU time of the host's work under ZeRO-3, relative to ZeRO-2, for a model that computes next to nothing.

    python benchmarks/host_time.py [--task sft|grpo|dpo|world] [--family qwen3_vl] [--steps 24] [--one-kind]

The model has as many modules as one with 2e9 parameters (28 layers, 24 vision blocks), but a width of 64, so that its CPU seconds
are those of Python, DeepSpeed's hooks and kernel launches. If they exceed the kernels' time, a GPU is idle in between.
Rows of text, images and clips alternate, so that micro-batches differ as real ones do. `grpo` measures updates with old and
reference log-probabilities on made-up completions, `dpo` measures updates with a reference, and `world` measures SFT of a video
transformer with 28 blocks.

The two DeepSpeed files train in separate processes, which take turns step by step, so that changes in the machine's speed affect
both alike. The output is each side's mean CPU seconds per micro-batch after four warm-up steps and, at the end, their ratio and
the slowest ZeRO-3 step relative to the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_report.materials import build_run_settings, write_rows  # noqa: E402 (the root is on the path only now)
from benchmarks.gpu_report.parts import BenchmarkSetup  # noqa: E402

WARMUP = 4
MAX_RATIO = {"sft": 1.15, "grpo": 1.3, "dpo": 1.3, "world": 1.3}
MAX_SPIKE = 2.5
SECONDS = "SECONDS "
"""Prefix of the line that reports a measured step."""
FILES = ("zero2.json", "zero3.json")
Step = Callable[[], int]
"""Function that runs one step and returns its number of micro-batches."""


def prepare_rows(arguments: argparse.Namespace) -> None:
    """Write rows with short answers, each with a rejected answer as well."""
    path = write_rows(BenchmarkSetup(arguments.scratch, cards=0, tiny=True), 48)
    rows = [json.loads(line) | {"rejected": "I see nothing."} for line in path.read_text().splitlines()]
    kept_rows = [row for row in rows if "image" in row or not arguments.one_kind]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept_rows))


def build_model(family: str, folder: Path) -> Path:
    import torch

    from dsreason.models.tiny import build_tiny

    return build_tiny(
        family,
        folder,
        dtype=torch.bfloat16,
        hidden_size=64,
        num_layers=28,
        intermediate_size=64,
        vision_hidden_size=64,
        vision_depth=24,
        head_size=32,
        num_key_value_heads=1,
        vocabulary_size=1024,
    )


def build_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    rows = write_rows(BenchmarkSetup(arguments.scratch, cards=0, tiny=True), 48)
    settings = build_run_settings(arguments.scratch / "model", rows)
    settings["data"]["workers"] = 0
    settings["train"] |= {"global_batch_size": 4, "max_tokens_per_micro_batch": 4096}
    return settings | {"deepspeed": arguments.file}


def iter_sft_steps(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[Step]:
    from dsreason.config.schema import SFTConfig
    from dsreason.train.sft.build import build_sft
    from dsreason.train.sft.loop import run_sft_step

    config = SFTConfig.model_validate(build_settings(arguments))
    sft = stack.enter_context(build_sft(config, arguments.scratch / f"sft-{arguments.file}", None))
    for batches in sft.loader:

        def step(batches: Any = batches) -> int:
            run_sft_step(sft.engine, batches, lr=1e-5, world=sft.world)
            return len(batches.micro_batches)

        yield step


def iter_dpo_steps(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[Step]:
    from dsreason.config.schema_dpo import DPOConfig
    from dsreason.train.dpo.build import build_dpo
    from dsreason.train.dpo.loop import run_dpo_step

    settings = build_settings(arguments)
    del settings["validation"]["generate"]
    config = DPOConfig.model_validate(settings | {"dpo": {"reference": "model"}})
    dpo = stack.enter_context(build_dpo(config, arguments.scratch / f"dpo-{arguments.file}", None))
    for batches in dpo.loader:

        def step(batches: Any = batches) -> int:
            world = dpo.job.world
            run_dpo_step(dpo.engine, batches, dpo.reference, dpo.baseline, lr=1e-5, config=config.dpo, world=world)
            return len(batches.micro_batches)

        yield step


def iter_grpo_steps(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[Step]:
    """Yield functions that run two optimizer steps on a rollout's completions, and compute the log-probabilities for them."""
    import torch

    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema_grpo import GRPOConfig
    from dsreason.data.sources import open_datasets
    from dsreason.engine.reference import ReferencePolicy
    from dsreason.job.ranks import init_world
    from dsreason.rollout.protocol import find_media_token_ids
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder
    from dsreason.train.grpo.update import accumulate_gradients, add_fixed_logprobs, split_into_micro_batches

    settings = build_settings(arguments)
    del settings["train"]["global_batch_size"]
    settings["train"]["max_tokens_per_micro_batch"] = 512
    grpo = {"num_generations": 4, "prompts_per_step": 4, "kl_coef": 0.01, "optimizer_steps_per_rollout": 2}
    settings |= {"grpo": grpo, "rollout": {"max_completion_length": 64}, "reward": {"functions": {"exact_match": 1.0}}}
    config = GRPOConfig.model_validate(settings)
    world, folder = init_world(), Path(config.model.path)
    deepspeed = resolve_deepspeed(config.deepspeed, config, device="cpu", world_size=world.size)
    engine = build_policy_engine(config, deepspeed, folder)
    reference, encoder = ReferencePolicy(engine), build_encoder(config, folder)
    samples, _ = open_datasets(config.data)
    banned = torch.tensor(find_media_token_ids(encoder.processor.tokenizer, encoder.family))
    for first in range(0, 10_000, 4):
        prompts = [encoder.encode_prompt(samples[(first + i) % len(samples)]) for i in range(4)]
        halves = [make_rollouts(prompts[:2], first), make_rollouts(prompts[2:], first + 2)]

        def step(halves: Any = halves) -> int:
            steps = [split_into_micro_batches(rollouts, config, encoder) for rollouts in halves]
            for micro_batches in add_fixed_logprobs(steps, engine, reference, None, config, banned):
                accumulate_gradients(engine, micro_batches, config, world, banned)
                engine.step()
            return sum(map(len, steps))

        yield step


def make_rollouts(prompts: list[Any], seed: int) -> list[Any]:
    """Make four completions from made-up tokens for each prompt."""
    import numpy as np

    from dsreason.rollout.protocol import make_single_turn
    from dsreason.train.grpo.rollouts import Rollout

    random, rollouts = np.random.default_rng(seed), []
    for group, prompt in enumerate(prompts):
        for _ in range(4):
            ids = tuple(random.integers(5, 60, random.integers(10, 60)).tolist())
            completion = make_single_turn(ids, "", tuple(random.normal(-5, 1, len(ids)).tolist()), "stop", 0)
            rollouts.append(Rollout(prompt, completion, 0.0, {}, float(random.normal()), group))
    return rollouts


def iter_world_steps(arguments: argparse.Namespace, stack: ExitStack) -> Iterator[Step]:
    from dsreason.world.schema import WorldConfig
    from dsreason.world.training.build import build_world
    from dsreason.world.training.loop import prepare_parts, train_on_part

    settings = {
        "deepspeed": arguments.file,
        "model": {"path": str(arguments.scratch / "model")},
        "data": {"format": "mock", "frames": 5, "height": 32, "width": 32, "validation": 0},
        "world": {"algorithm": "sft"},
        "optim": {"lr": 1e-5, "warmup": 0},
        "train": {"max_steps": 10_000, "global_batch_size": 4, "micro_batch_size": 2},
        "validation": {"before_training": False, "max_samples": 0},
        "checkpoint": {"every": 0, "export": "none", "keep_best": False},
    }
    config = WorldConfig.model_validate(settings)
    output = arguments.scratch / f"world-{arguments.file}"
    trainer = stack.enter_context(build_world(config, output, None))
    for number in range(1, 10_000):
        (part,), _ = prepare_parts(trainer)

        def step(part: Any = part, number: int = number) -> int:
            train_on_part(trainer, part, number)
            return len(part)

        yield step


TASKS = {"sft": iter_sft_steps, "grpo": iter_grpo_steps, "dpo": iter_dpo_steps, "world": iter_world_steps}


def measure(arguments: argparse.Namespace) -> None:
    """Run a step for each line of standard input, and print that step's CPU seconds per micro-batch."""
    from dsreason.job.launch import prepare_environment

    prepare_environment()
    import torch

    torch.set_num_threads(1)
    with ExitStack() as stack:
        for step in TASKS[arguments.task](arguments, stack):
            if not sys.stdin.readline():
                break
            started = time.process_time()
            count = step()
            print(f"{SECONDS}{(time.process_time() - started) / count}", flush=True)


def prepare(arguments: argparse.Namespace) -> None:
    if arguments.task == "world":
        from dsreason.world.families import FAMILIES

        FAMILIES[arguments.family].build_tiny(arguments.scratch / "model", num_layers=28)
    else:
        prepare_rows(arguments)
        build_model(arguments.family, arguments.scratch / "model")


def start_side(arguments: argparse.Namespace, file: str, scratch: Path) -> subprocess.Popen[str]:
    """Start training with one DeepSpeed file in a separate process."""
    command = [sys.executable, __file__, "--task", arguments.task, "--family", arguments.family]
    command += ["--file", file, "--scratch", str(scratch)]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    log = (scratch / f"{file}.log").open("w")
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        text=True,
        bufsize=1,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )


def run_step(side: subprocess.Popen[str], log: Path) -> float:
    assert side.stdin is not None and side.stdout is not None
    with suppress(BrokenPipeError):
        side.stdin.write("\n")
    for line in side.stdout:
        if line.startswith(SECONDS):
            return float(line.removeprefix(SECONDS))
    sys.exit(f"the training failed; its log ends with:\n{log.read_text()[-3000:]}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="sft")
    parser.add_argument("--family", help="default: qwen3_vl, or wan for world models")
    parser.add_argument("--steps", type=int, default=24, help="steps per side, of which the first four are not counted")
    parser.add_argument("--one-kind", action="store_true", help="use only rows with images")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.family = arguments.family or ("wan" if arguments.task == "world" else "qwen3_vl")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.file:
        measure(arguments)
        return
    seconds: dict[str, list[float]] = {file: [] for file in FILES}
    with tempfile.TemporaryDirectory() as folder:
        arguments.scratch = Path(folder)
        prepare(arguments)
        sides = {file: start_side(arguments, file, Path(folder)) for file in FILES}
        try:
            for _ in range(arguments.steps):
                for file, side in sides.items():
                    seconds[file].append(run_step(side, Path(folder) / f"{file}.log"))
        finally:
            for side in sides.values():
                side.kill()
                side.wait()
    counted = {file: steps[WARMUP:] for file, steps in seconds.items()}
    means = {file: statistics.mean(steps) for file, steps in counted.items()}
    spikes = {file: max(steps) / statistics.median(steps) for file, steps in counted.items()}
    for file in FILES:
        print(f"{file}: {means[file]:.3f} CPU s per micro-batch, slowest step / median {spikes[file]:.1f}")
    print(f"goals: ratio at most {MAX_RATIO[arguments.task]}, slowest step at most {MAX_SPIKE} of the median")
    ratio, spike = means["zero3.json"] / means["zero2.json"], spikes["zero3.json"]
    print(f"zero3 / zero2: {ratio:.2f}, slowest step {spike:.1f} of the median")


if __name__ == "__main__":
    main()
