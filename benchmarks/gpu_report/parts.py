"""The parts of the report: what each measures, how long it may take, and the goals that its measurements have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

Value = float | int | str | bool


class SkipPart(Exception):
    """A part raises it where the machine is not made for it, with the reason."""


@dataclass(frozen=True)
class Goal:
    """What the measurements whose names match `pattern` should be: `Goal("* wake + sync, s", "<=", 2.0)`."""

    pattern: str
    relation: Literal["<=", ">=", "==", "!="]
    bound: Value
    on_cpu: bool = False
    """Whether it counts in a run without a GPU too."""

    def __str__(self) -> str:
        return f"{self.relation} {shown(self.bound)}"

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)

    def is_met(self, value: Value) -> bool:
        if self.relation in ("==", "!="):
            return (value == self.bound) == (self.relation == "==")
        if isinstance(value, str) or math.isnan(value):
            return False
        return value <= float(self.bound) if self.relation == "<=" else value >= float(self.bound)


@dataclass(frozen=True)
class Part:
    """One part; its function is `benchmarks.gpu_report.<module>.<name>(setting)` and yields names and values."""

    name: str
    module: str
    seconds: int
    """How long it may take."""
    about: str
    goals: tuple[Goal, ...] = ()
    cards: int = 1
    """How many it needs."""


def shown(value: Value) -> str:
    """Four significant digits, `yes` and `no`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


HAND_OVER_GOALS = (
    Goal("given back by sleep / taken by wake, sync and generate", ">=", 0.9),
    Goal("device left beside torch's own while asleep, GiB", "<=", 4.0),
)
POISON_GOALS = (
    Goal("same answers after sleep", "==", True, on_cpu=True),
    Goal("tensors that are not zero again", "==", 0),
)

# In this order; a size that may bring the machine down comes last.
PARTS = (
    Part(
        "environment",
        "environment",
        30,
        "versions, driver, cards, links between them, and what the card does without dsreason",
        (Goal("driver for CUDA 13 (>= 580)", "==", True),),
    ),
    Part(
        "zero",
        "training",
        110,
        "one forward, backward and step with each DeepSpeed file, both families",
        (Goal("*: ran", "==", True, on_cpu=True), Goal("*: buffers elsewhere", "==", 0, on_cpu=True)),
    ),
    Part(
        "attention",
        "kernels",
        60,
        "attention kernels that are chosen, their time, and gradients that are no number",
        (
            Goal("as dsreason sets it: * kernel", "!=", "CUDNN_ATTENTION"),
            Goal("as dsreason sets it: * non-finite gradients", "==", 0, on_cpu=True),
        ),
    ),
    Part(
        "vision",
        "kernels",
        60,
        "the vision towers as they are, with windows of one size together, with one call for all; experiments",
        (Goal("* windows of one size together: difference", "<=", 0.02, on_cpu=True),),
    ),
    Part("head", "kernels", 30, "log-probabilities and entropy by chunk size"),
    Part(
        "parity_bf16",
        "runs",
        110,
        "log-probabilities of trainer and engine in bf16, both families, text, image and video",
        (Goal("*: mismatch/kl*", "<=", 1e-2, on_cpu=True),),
    ),
    Part(
        "parity_fp32",
        "runs",
        110,
        "the same in fp32",
        (Goal("*: mismatch/root_mean_square_logprob*", "<=", 1e-5, on_cpu=True),),
    ),
    Part(
        "ledger_05b",
        "engines",
        75,
        "seconds and GiB of each phase of a rollout, 0.5 billion parameters",
        HAND_OVER_GOALS,
    ),
    Part(
        "ledger_2b",
        "engines",
        100,
        "the same, 2 billion",
        (*HAND_OVER_GOALS, Goal("wake + sync, s", "<=", 2.0)),
    ),
    Part("sync", "engines", 90, "weights into the engine by bucket size, against a device copy of the same bytes"),
    Part(
        "state_poison_qwen2_5_vl",
        "engines",
        60,
        "what sleep loses and nobody writes again: freed memory is filled with NaN while vLLM sleeps",
        POISON_GOALS,
    ),
    Part("state_poison_qwen3_vl", "engines", 60, "the same, the other family", POISON_GOALS),
    Part("sft", "training", 90, "tokens/s, model FLOPs utilization, and padding of SFT"),
    Part(
        "grpo",
        "runs",
        120,
        "a GRPO step split by phase",
        (Goal("mismatch/kl", "<=", 1e-2, on_cpu=True),),
    ),
    Part(
        "checkpoint",
        "training",
        100,
        "how long training waits for a checkpoint; SIGTERM and resume",
        (
            Goal("stall / save that training waits for", "<=", 0.1),
            Goal("resumed after the step it was stopped at", "==", True, on_cpu=True),
        ),
    ),
    Part(
        "leaks",
        "runs",
        95,
        "memory over 20 GRPO steps, and a quiet end",
        (
            Goal("allocated after step 12 above steps 2 to 8, MiB", "<=", 8.0),
            Goal("device after step 12 above steps 2 to 8, MiB", "<=", 256.0),
            Goal("lines with a CUDA error", "==", 0, on_cpu=True),
        ),
    ),
    Part("processor", "engines", 80, "media processing and generation with and without vLLM's processor cache"),
    Part("cards", "runs", 240, "SFT, and GRPO with tensor parallelism, on all cards", cards=2),
    Part(
        "ledger_7b",
        "engines",
        110,
        "the ledger with 7 billion parameters, zero3_offload, where it fits",
        HAND_OVER_GOALS,
    ),
)
BY_NAME = {part.name: part for part in PARTS}


@dataclass(frozen=True)
class Setting:
    """What a part is given."""

    scratch: Path
    """A folder that all parts of one call share, for models and runs."""
    cards: int
    """GPUs; 0: everything runs on the CPU."""
    tiny: bool
    """Sizes with which the script itself is tried; they say nothing about speed."""

    @property
    def device(self) -> str:
        return "cuda" if self.cards else "cpu"
