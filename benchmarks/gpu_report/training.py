"""Training of a policy under DeepSpeed: a first step with each configuration file, the speed of SFT, and checkpoints."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_report.commands import CommandRun, Running, read_metrics
from benchmarks.gpu_report.materials import (
    FAMILIES,
    build_random_model,
    build_run_settings,
    build_tiny_model,
    check_fits,
    find_largest_size,
    write_rows,
)
from benchmarks.gpu_report.parts import BenchmarkSetup, Value

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from dsreason.data.chat import Encoder
    from dsreason.data.loader import StepBatches

DEEPSPEED_FILES = ("zero2.json", "zero3.json", "zero3_offload.json")
STOPPED = 75
"""Exit code of a run that a signal stopped."""


def zero(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """With each DeepSpeed file, train a tiny model for a step on a clip; if a step fails, continue with the next file."""
    from dsreason.job.ranks import init_world, shutdown

    init_world()
    for file in DEEPSPEED_FILES:
        for family in FAMILIES:
            try:
                yield from run_first_step(f"{file} {family}", file, family, setup)
            except Exception as error:  # noqa: BLE001 (this part reports any error)
                yield f"{file} {family}: ran", f"{type(error).__name__}: {error}"[:500]
    shutdown()


def run_first_step(name: str, file: str, family: str, setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    from dsreason.config.deepspeed import resolve_deepspeed
    from dsreason.config.schema import SFTConfig
    from dsreason.engine.engine import get_grad_norm
    from dsreason.train.common.opening import build_policy_engine
    from dsreason.train.common.preflight import build_encoder

    model = build_tiny_model(setup, family)
    config, started = SFTConfig(), time.perf_counter()
    policy = build_policy_engine(config, resolve_deepspeed(file, config, device=setup.device, world_size=1), model)
    yield f"{name}: built, s", time.perf_counter() - started
    yield f"{name}: buffers elsewhere", sum(buffer.device != policy.device for buffer in policy.module.buffers())
    started = time.perf_counter()
    train_on_a_clip(policy, build_encoder(config, model))
    norm = get_grad_norm(policy)
    yield f"{name}: ran", norm > 0 and norm != float("inf")
    yield f"{name}: step, s", time.perf_counter() - started


def train_on_a_clip(policy: DeepSpeedEngine, encoder: Encoder) -> None:
    """Run one step on the smallest clip, which creates the optimizer's moments."""
    from dataclasses import replace

    import torch

    from dsreason.data.collate import collate

    clip = encoder.build_dummy("video")
    clip = replace(clip, id="0", loss_mask=torch.arange(len(clip)) > 0)
    logprobs = policy(collate([clip], pad_id=0).to(policy.device))
    policy.set_gradient_accumulation_boundary(True)
    policy.backward(-logprobs.mean(), scale_wrt_gas=False)
    policy.step()


# ---------------------------------------------------------------- SFT


def sft(setup: BenchmarkSetup, *, file: str = "zero3.json") -> Iterator[tuple[str, Value]]:
    settings = build_sft_settings(setup, find_largest_size(setup)) | {"deepspeed": file}
    yield from measure_sft(setup, settings, f"sft-{file}")


sft_zero2 = partial(sft, file="zero2.json")


def lora_8b(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    settings = build_sft_settings(setup, check_fits(setup, "8B")) | {"lora": {"rank": 16}}
    yield from measure_sft(setup, settings, "lora-8b")


def measure_sft(setup: BenchmarkSetup, settings: dict[str, Any], folder: str) -> Iterator[tuple[str, Value]]:
    """Yield the speeds after each step, so that the measurements exist even if the time limit ends the part."""
    output = setup.scratch / folder
    for measurement in run_sft_steps(settings, output, 4 if setup.tiny else 10):
        yield measurement
        yield from compute_speeds(read_metrics(output))


def build_sft_settings(setup: BenchmarkSetup, size: str) -> dict[str, Any]:
    model, rows = build_random_model(setup, size), write_rows(setup, 24 if setup.tiny else 192)
    settings = build_run_settings(model, rows)
    settings["train"] |= {
        "global_batch_size": 8 if setup.tiny else 64,
        "max_tokens_per_micro_batch": 4096 if setup.tiny else 16384,
    }
    return settings


def run_sft_steps(settings: dict[str, Any], output: Path, steps: int) -> Iterator[tuple[str, Value]]:
    """Run the first steps of `dsreason sft`, without the final checkpoint. Every rank of the job must call this."""
    from dsreason.config.schema import SFTConfig
    from dsreason.train.sft.build import build_sft
    from dsreason.train.sft.loop import train_on_batches

    config = SFTConfig.model_validate(settings)
    with build_sft(config, output, None) as trainer:
        yield "parameters, billions", count_parameters(trainer.engine) / 1e9
        for number, batches in enumerate(islice(trainer.loader, steps)):
            train_on_batches(trainer, batches)
            yield "steps", number + 1
            if number == 0:
                yield "micro-batches a step", len(batches.micro_batches)
                yield "padding, share of tokens", compute_padding(batches)


def compute_padding(batches: StepBatches) -> float:
    return 1 - batches.work.tokens / sum(batch.input_ids.numel() for batch in batches.micro_batches)


def count_parameters(engine: DeepSpeedEngine) -> int:
    from dsreason.engine.engine import get_full_shape

    return sum(get_full_shape(parameter).numel() for parameter in engine.module.parameters())


def compute_speeds(lines: list[dict[str, Any]]) -> Iterator[tuple[str, Value]]:
    """Yield an SFT run's step times and metrics, averaged over all steps except the first two; yield nothing for shorter runs."""
    steps = [line for line in lines if "train/loss" in line]
    late = steps[2:]
    if not late:
        return
    yield "single steps, s", " ".join(f"{line['time/train']:.2f}" for line in steps)
    yield "slowest step / median", max(seconds := [line["time/train"] for line in late]) / median(seconds)
    for name in ("perf/tokens_per_second", "perf/mfu", "time/data", "time/train", "memory/train/peak_gib"):
        if name in late[0]:  # the peak FLOPs of CPUs and of unknown cards are not known
            yield name, sum(line[name] for line in late) / len(late)


# ---------------------------------------------------------------- checkpoints


def checkpoint(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    yield from measure_stall(setup)
    yield from stop_and_resume(setup)


def measure_stall(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    from benchmarks.checkpoint_stall import compute_medians, measure
    from dsreason.job.ranks import init_world, shutdown

    seconds_by_name, size = measure(
        setup.scratch / "stall", 0.05 if setup.tiny else 4.0, 1 if setup.tiny else 2, init_world()
    )
    shutdown()
    typical = compute_medians(seconds_by_name)
    yield "checkpoint, GiB", size / 2**30
    yield "first stall, memory for the copy included, s", seconds_by_name["stall"][0]
    yield from ((f"{name}, s", seconds) for name, seconds in typical.items())
    yield "stall / save that training waits for", typical["stall"] / typical["waited"]
    yield "step while a checkpoint is written / alone", typical["step meanwhile"] / typical["step alone"]


def stop_and_resume(setup: BenchmarkSetup) -> Iterator[tuple[str, Value]]:
    """Send SIGTERM to a tiny run after its third step, then run the same command again."""
    model = build_tiny_model(setup)
    settings = build_run_settings(model, write_rows(setup, 24))
    settings["train"] |= {"global_batch_size": 4}
    running = Running("sft", settings, setup.scratch / "stopped")
    running.wait_for_steps(3)
    running.stop(signal.SIGTERM)
    stopped = running.finish(expected=STOPPED)
    yield "from SIGTERM to the end, s", stopped.seconds
    settings["train"]["max_steps"] = last_step(stopped) + 2
    resumed = Running("sft", settings, setup.scratch / "stopped", resume=True).finish()
    steps = [line["step"] for line in resumed.steps]
    yield "resumed after the step it was stopped at", steps == list(range(1, last_step(stopped) + 3))
    yield "resumed run, from start to end, s", resumed.seconds


def last_step(run: CommandRun) -> int:
    return max(line["step"] for line in run.steps)
