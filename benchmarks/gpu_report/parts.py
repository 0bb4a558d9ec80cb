"""The parts of the report, with their measurements, time limits and goals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

Value = float | int | str | bool


class SkipPart(Exception):
    """Error that a part raises, with a reason, if it cannot run on this machine."""


@dataclass(frozen=True)
class Goal:
    """A goal for the measurements whose names match `pattern`: `Goal("* wake + sync, s", "<=", 2.0)`."""

    pattern: str
    relation: Literal["<=", ">=", "==", "!="]
    bound: Value
    on_cpu: bool = False
    """Whether the goal also applies without a GPU."""

    def __str__(self) -> str:
        return f"{self.relation} {format_value(self.bound)}"

    def match_name(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def is_met(self, value: Value) -> bool:
        if self.relation in ("==", "!="):
            return (value == self.bound) == (self.relation == "==")
        if isinstance(value, str) or math.isnan(value):
            return False
        return value <= float(self.bound) if self.relation == "<=" else value >= float(self.bound)


@dataclass(frozen=True)
class Part:
    """A part of the report; its function is `<module>.<name>(setup)`, which yields names and values."""

    name: str
    module: str
    seconds: int
    """Time limit in seconds on a GPU."""
    about: str
    goals: tuple[Goal, ...] = ()
    cards: int = 1
    """Minimum number of GPUs."""
    beside: bool = False
    """Whether the part only checks correctness, so that it may run in parallel with other parts."""


def format_value(value: Value) -> str:
    """Format a value: four significant digits, `yes` or `no`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


HAND_OVER_GOALS = (Goal("given back by sleep / taken by wake, sync and generate", ">=", 0.9),)
POISON_GOALS = (
    Goal("same answers after *", "==", True, on_cpu=True),
    Goal("tensors that dsreason does not write back either", "==", 0, on_cpu=True),
)
SFT_GOALS = (Goal("perf/tokens_per_second", ">=", 20_000), Goal("slowest step / median", "<=", 1.5))

ENVIRONMENT, KERNELS, ELEMENTWISE, TRAINING, ENGINES, RUNS = (
    f"{__package__}.{name}" for name in ("environment", "kernels", "elementwise", "training", "engines", "runs")
)

# The parts run in this order; the size that may exhaust the machine's memory comes last.
PARTS = (
    Part(
        "environment",
        ENVIRONMENT,
        30,
        "versions, driver, cards, links between them, and the speed of the card without dsreason",
    ),
    Part(
        "zero",
        TRAINING,
        100,
        "one forward pass, backward pass and optimizer step with each DeepSpeed file, both families",
        (Goal("*: ran", "==", True, on_cpu=True), Goal("*: buffers elsewhere", "==", 0, on_cpu=True)),
        beside=True,
    ),
    Part(
        "attention",
        KERNELS,
        40,
        "chosen attention kernels, their time, NaN gradients, and packed rows",
        (
            Goal("packed *: difference", "<=", 0.02, on_cpu=True),
            Goal("as dsreason sets it: * kernel", "!=", "CUDNN_ATTENTION"),
            Goal("as dsreason sets it: * non-finite gradients", "==", 0, on_cpu=True),
        ),
        beside=True,
    ),
    Part(
        "vision",
        KERNELS,
        45,
        "the vision towers, computed by transformers (one kernel call per window) and by dsreason",
        (Goal("* as dsreason computes it: difference", "<=", 0.05, on_cpu=True),),
    ),
    Part(
        "fused",
        ELEMENTWISE,
        40,
        "RMSNorm, SwiGLU and rotary positions by transformers, torch, torch.compile and Liger-Kernel",
        (Goal("*: difference", "<=", 0.02, on_cpu=True),),
    ),
    Part("head", KERNELS, 25, "log-probabilities and entropy by chunk size"),
    Part(
        "parity_bf16",
        RUNS,
        100,
        "log-probabilities of trainer and engine in bf16, both families, text, image and video",
        (Goal("*: mismatch/kl*", "<=", 1e-2, on_cpu=True),),
        beside=True,
    ),
    Part(
        "parity_fp32",
        RUNS,
        100,
        "log-probabilities of trainer and engine in fp32, both families, text, image and video",
        (Goal("*: mismatch/root_mean_square_logprob*", "<=", 1e-5, on_cpu=True),),
        beside=True,
    ),
    Part(
        "ledger_05b",
        ENGINES,
        60,
        "seconds and GiB of each phase of a rollout, 0.5 billion parameters",
        HAND_OVER_GOALS,
    ),
    Part(
        "ledger_2b",
        ENGINES,
        95,
        "seconds and GiB of each phase of a rollout, 2 billion parameters",
        (*HAND_OVER_GOALS, Goal("wake + sync, s", "<=", 2.0)),
    ),
    Part(
        "sync", ENGINES, 75, "sync of weights to the engine by bucket size, relative to a device copy of the same bytes"
    ),
    Part(
        "state_poison_qwen2_5_vl",
        ENGINES,
        55,
        "state of Qwen2.5-VL that sleep loses and nothing restores: vLLM wakes with garbage in memory",
        POISON_GOALS,
    ),
    Part(
        "state_poison_qwen3_vl",
        ENGINES,
        55,
        "state of Qwen3-VL that sleep loses and nothing restores: vLLM wakes with garbage in memory",
        POISON_GOALS,
    ),
    Part("sft", TRAINING, 60, "tokens/s, model FLOPs utilization and single steps of SFT with zero3.json", SFT_GOALS),
    Part(
        "sft_zero2",
        TRAINING,
        50,
        "tokens/s, model FLOPs utilization and single steps of SFT with zero2.json",
        SFT_GOALS,
    ),
    Part(
        "grpo",
        RUNS,
        200,
        "duration of a GRPO step by phase",
        (
            Goal("mismatch/kl", "<=", 1e-2, on_cpu=True),
            Goal("step, s", "<=", 5.0),
            Goal("wake + sync, s", "<=", 1.0),
        ),
    ),
    Part(
        "checkpoint",
        TRAINING,
        85,
        "time that training waits for a checkpoint; SIGTERM and resume",
        (
            Goal("stall / save that training waits for", "<=", 0.1),
            Goal("resumed after the step it was stopped at", "==", True, on_cpu=True),
        ),
    ),
    Part(
        "leaks",
        RUNS,
        85,
        "memory over 20 GRPO steps, and an end without CUDA errors",
        (
            Goal("allocated after step 12 above steps 2 to 8, MiB", "<=", 8.0),
            Goal("device after step 12 above steps 2 to 8, MiB", "<=", 256.0),
            Goal("lines with a CUDA error", "==", 0, on_cpu=True),
        ),
    ),
    Part("lora_8b", TRAINING, 95, "SFT of adapters on 8 billion parameters, on a card with 80 GB"),
    Part("processor", ENGINES, 75, "media processing and generation with and without vLLM's processor cache"),
    Part("cards_sft", RUNS, 90, "SFT on all cards", cards=2),
    Part("cards_grpo", RUNS, 140, "GRPO on all cards", cards=2),
    Part("cards_grpo_tp2", RUNS, 140, "GRPO on all cards, with two cards per copy of vLLM's model", cards=2),
    Part(
        "ledger_7b",
        ENGINES,
        150,
        "seconds and GiB of each phase of a rollout, 7 billion parameters with zero3_offload, if it fits",
        HAND_OVER_GOALS,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
SHORT = (
    ("environment", "zero", "attention", "parity_bf16", "parity_fp32")
    + ("sft", "grpo", "sft_zero2", "sync", "ledger_2b", "fused", "lora_8b", "vision", "leaks", "checkpoint")
)  # fmt: skip
"""Parts to run if time on a GPU is short, the most informative first."""
CHECKS_SHARE = 0.3
"""Share of the time limit for the entire call that the parts running in parallel may use."""


@dataclass(frozen=True)
class BenchmarkSetup:
    """The folder, the devices and the sizes that a part uses."""

    scratch: Path
    """Folder for models and runs, which all parts of an invocation share."""
    cards: int
    """Number of GPUs; 0 runs everything on the CPU."""
    tiny: bool
    """Whether to use sizes that only test the script and say nothing about speed."""

    @property
    def device(self) -> str:
        return "cuda" if self.cards else "cpu"
