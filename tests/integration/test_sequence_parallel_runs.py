"""Runs of `dsreason sft` and `dsreason grpo` whose ranks compute each row together.

The runs have the same results as runs whose ranks compute separate rows, and can be resumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = [pytest.mark.integration, pytest.mark.long]

SHARED = """
[model]
path = "{model}"
max_length = 256
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
validation = 3
[optim]
lr = 1e-3
[train]
epochs = 4
precision = "fp32"
{train}
[validation]
max_completion_length = 4
[checkpoint]
every = {every}
keep = -1
"""
SFT = {"train": "global_batch_size = 6\nmax_steps = 6", "every": 3}
GRPO = {"train": "max_steps = 4", "every": 2}
GRPO_SECTIONS = """
[grpo]
prompts_per_step = 4
num_generations = 4
optimizer_steps_per_rollout = 2
kl_coef = 0.05
[rollout]
engine = "transformers"
max_completion_length = 6
temperature = 0.9
[reward.functions]
"rewards.py:vowels" = 1.0
"""
REWARDS = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    rows = write_mixed_rows(folder / "data", 12)
    (folder / "sft.toml").write_text(SHARED.format(model=tiny_qwen3_vl, rows=rows, **SFT))
    (folder / "grpo.toml").write_text(SHARED.format(model=tiny_qwen3_vl, rows=rows, **GRPO) + GRPO_SECTIONS)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def train(folder: Path, command: str, name: str, ranks: int, ranks_per_row: int, *options: str) -> Path:
    size = f"train.sequence_parallel_size={ranks_per_row}"
    arguments = ("--config", f"{command}.toml", "--output-dir", name, "--nproc", ranks, "--set", size, *options)
    ended = dsreason(command, *arguments, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder / name


def steps(run: Path, after: int = 0) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "train/loss" in line and line["step"] > after]


def validations(run: Path) -> list[float]:
    return [line["val/loss"] for line in metrics(run) if "val/loss" in line]


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


def same_exports(run: Path, other: Path) -> bool:
    result, expected = (load_file(item / "export/final/model.safetensors") for item in (run, other))
    return result.keys() == expected.keys() and all(result[name].equal(expected[name]) for name in expected)


@pytest.fixture(scope="module")
def sft(folder: Path) -> Path:
    """Run six steps on two groups of two ranks, with checkpoints after steps three and six."""
    return train(folder, "sft", "sft", 4, 2)


def test_sft_matches_single_rank(folder: Path, sft: Path) -> None:
    alone = train(folder, "sft", "sft_alone", 1, 1)
    for line, expected in zip(steps(sft), steps(alone), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/tokens", "train/epoch"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4), name
    assert validations(sft) == pytest.approx(validations(alone), rel=1e-4)


@pytest.mark.nightly
def test_sft_resumes_bit_for_bit(folder: Path, sft: Path) -> None:
    resumed = train(folder, "sft", "sft_resumed", 4, 2, "--resume", "sft/checkpoints/step_3")
    assert [line["train/loss"] for line in steps(resumed)] == [line["train/loss"] for line in steps(sft, after=3)]
    assert same_exports(resumed, sft)


@pytest.fixture(scope="module")
def grpo(folder: Path) -> Path:
    """Run four steps, two per rollout, on two groups of two ranks, with checkpoints after steps two and four."""
    return train(folder, "grpo", "grpo", 4, 2)


def test_grpo_matches_single_rank(folder: Path, grpo: Path) -> None:
    alone = train(folder, "grpo", "grpo_alone", 1, 1)

    def sampled(run: Path) -> set[tuple[Any, ...]]:
        names = ("id", "completion", "reward", "advantage", "trained")
        rows = [tuple(row[name] for name in names) for row in rollouts(run, 0)]
        assert len(rows) == 16
        return set(rows)

    assert sampled(grpo) == sampled(alone)
    names = ("train/loss", "train/grad_norm", "policy/kl", "policy/entropy", "policy/clip_fraction", "mismatch/kl")
    for line, expected in zip(steps(grpo)[:2], steps(alone)[:2], strict=True):  # later rollouts differ by rounding
        for name in (*names, "reward/mean", "completion/length_mean"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_grpo_resumes_bit_for_bit(folder: Path, grpo: Path) -> None:
    resumed = train(folder, "grpo", "grpo_resumed", 4, 2, "--resume", "grpo/checkpoints/step_2")
    assert rollouts(resumed, 2) == rollouts(grpo, 2)
    names = ("train/loss", "train/grad_norm", "reward/mean", "mismatch/kl", "policy/kl")
    before, after = ([[line[name] for name in names] for line in steps(run, after=2)] for run in (grpo, resumed))
    assert before == after
    assert same_exports(resumed, grpo)
