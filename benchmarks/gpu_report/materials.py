"""Inputs for the parts: random models of real sizes, rows with media, and run configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.parts import BenchmarkSetup, SkipPart
from dsreason.files.atomic import build_once, write_file

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"head_size": 64, "num_key_value_heads": 1, "vocabulary_size": 1024},
    # 0.6e9, 1.9e9, 8.7e9 and 7.4e9 parameters; the shapes are those of Qwen3-VL with 2 and 8 billion parameters.
    "0.5B": {"hidden_size": 1024, "num_layers": 28, "intermediate_size": 3072},
    "2B": {"hidden_size": 2048, "num_layers": 28, "intermediate_size": 6144},
    "8B": {"hidden_size": 4096, "num_layers": 36, "intermediate_size": 12288, "tie_embeddings": False},
    "7B": {"hidden_size": 4096, "num_layers": 32, "intermediate_size": 12288, "tie_embeddings": False},
}
REAL = {"head_size": 128, "num_key_value_heads": 8, "vocabulary_size": 151_936}
TOWER = {"vision_hidden_size": 1024, "vision_depth": 24}
DEVICE_GIB = {"0.5B": 20, "2B": 60, "7B": 70, "8B": 75}
"""Minimum memory, in GiB, of a card on which a policy and an engine of each size fit together."""

REWARD = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"
QUESTIONS = ("What colour is the ball?", "Which way does the ball move?", "Describe what you see.")
ANSWER = "The ball moves to the left, and the square is green."


def build_random_model(setup: BenchmarkSetup, size: str, family: str = "qwen3_vl", precision: str = "bf16") -> Path:
    """Return the folder of a model with random weights; it is built once per report, on the device that is used for training."""
    from dsreason.models.tiny import build_tiny
    from dsreason.train.common.preflight import DTYPES

    size = "tiny" if setup.tiny else size
    sizes = SIZES[size] if size == "tiny" else {**REAL, **TOWER, **SIZES[size]}
    build = partial(build_tiny, family, dtype=DTYPES[precision], device=setup.device, **sizes)
    return build_once(setup.scratch / "models" / f"{family}-{size}-{precision}", build)


def build_tiny_model(setup: BenchmarkSetup, family: str = "qwen3_vl", precision: str = "bf16") -> Path:
    """Return the folder of a tiny model, for parts whose result does not depend on the size."""
    return build_random_model(replace(setup, tiny=True), "tiny", family, precision)


def find_largest_size(setup: BenchmarkSetup) -> str:
    """Return the larger size, 2B or 0.5B, that fits on the card; raise SkipPart if neither fits."""
    return "2B" if setup.tiny or get_card_gib() >= DEVICE_GIB["2B"] else check_fits(setup, "0.5B")


def check_fits(setup: BenchmarkSetup, size: str) -> str:
    """Return the size unchanged; raise SkipPart if a model of this size does not fit on the card."""
    if not setup.tiny and get_card_gib() < DEVICE_GIB[size]:
        raise SkipPart(
            f"{size} parameters need a card with {DEVICE_GIB[size]} GiB, but this one has {get_card_gib():.0f}"
        )
    return size


def get_card_gib() -> float:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


def write_rows(setup: BenchmarkSetup, count: int) -> Path:
    """Write a JSONL file whose rows alternate between text, a picture and a clip.

    Answers have 1 to 40 sentences, usually only a few.
    """
    fill = partial(fill_with_rows, setup, count)
    return build_once(setup.scratch / f"rows-{count}", fill) / "rows.jsonl"


def fill_with_rows(setup: BenchmarkSetup, count: int, folder: Path) -> None:
    import numpy as np
    from PIL import Image

    from dsreason.builtin_task.clips import write_clip

    folder.mkdir(exist_ok=True)
    frames, height, width = (4, 64, 64) if setup.tiny else (16, 240, 320)
    random, rows = np.random.default_rng(0), []
    for number in range(count):
        sentences = int(np.ceil(random.lognormal(1.0, 0.9)).clip(1, 4 if setup.tiny else 40))
        answer = " ".join([ANSWER] * sentences)
        row = {"id": str(number), "question": QUESTIONS[number % 3], "answer": answer}
        clip = np.zeros((frames, height, width, 3), np.uint8)
        clip[:] = random.integers(0, 200, 3)
        for i, frame in enumerate(clip):
            frame[20:50, 3 * i : 3 * i + 30] = 255 - number % 50
        if number % 3 == 1:
            Image.fromarray(clip[0]).save(folder / f"{number}.png")
            row["image"] = f"{number}.png"
        elif number % 3 == 2:
            write_clip(folder / f"{number}.mp4", clip)
            row["video"] = f"{number}.mp4"
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_run_settings(model: Path, rows: Path, *, precision: str = "bf16") -> dict[str, Any]:
    """Build the settings that all runs in the report share: no generated answers, intermediate checkpoints or export.

    `train.max_steps` is larger than any run's number of steps.
    """
    return {
        "deepspeed": "zero3.json",
        "model": {"path": str(model), "max_length": 2048},
        "data": {"adapter": "jsonl", "path": str(rows), "workers": 4, "vision": {"fps": 4.0}},
        "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant"},
        "train": {"precision": precision, "epochs": 1000, "max_steps": 10_000},
        "validation": {"before_training": False, "generate": False},
        "checkpoint": {"every": 0, "export": "none"},
    }


def build_grpo_settings(
    setup: BenchmarkSetup, model: Path, *, prompts: int, generations: int, length: int, precision: str = "bf16"
) -> dict[str, Any]:
    """Build the settings for a GRPO run that rewards vowels and has no KL term; vLLM may use 0.4 of the card's memory."""
    rows = write_rows(setup, 24)
    reward = rows.with_name("rewards.py")
    write_file(reward, REWARD)
    settings = build_run_settings(model, rows, precision=precision)
    settings["train"] |= {"max_tokens_per_micro_batch": 4096 if setup.tiny else 16384}
    return settings | {
        "grpo": {"prompts_per_step": prompts, "num_generations": generations, "kl_coef": 0.0},
        "rollout": {"gpu_memory_utilization": 0.4, "max_completion_length": length},
        "reward": {"functions": {f"{reward}:vowels": 1.0}},
    }
