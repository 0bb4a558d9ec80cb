"""GRPO on the built-in task with ZeRO-3 and a colocated vLLM engine: the model improves only if the reward is informative."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsreason.cli.demo import compute_accuracies
from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.long]

SHUFFLED = """
import hashlib


def shuffled(completion, sample):
    return hashlib.sha256(f"{sample.id} {completion}".encode()).digest()[0] % 2
"""


def train(warm_start: Path, folder: Path, *options: object) -> list[dict[str, float]]:
    """Continue training from the warm start with the built-in GRPO recipe; return the run's metrics."""
    (folder / "rewards.py").write_text(SHUFFLED)
    model = f'model.path="{warm_start / "export" / "final"}"'
    arguments = ("--nproc", 2, "--output-dir", "D", "--set", model, *options)
    ended = dsreason("grpo", *arguments, cwd=folder, timeout=2400)
    assert ended.returncode == 0, ended.stderr
    return metrics(folder / "D")


def accuracies(lines: list[dict[str, float]]) -> list[float]:
    return [line["val/accuracy"] for line in lines if "val/accuracy" in line]


def test_warm_start_answers_half_incorrectly(warm_start: Path) -> None:
    assert 0.4 <= metrics(warm_start)[-1]["val/accuracy"] <= 0.6


def test_reward_raises_accuracy_of_full_training(demo: Path) -> None:
    lines = metrics(demo / "grpo")
    first, *_, last = accuracies(lines)
    assert 0.4 <= first <= 0.6
    # The accuracy rises from 50 % to between 85 % and 94 %, depending on the machine; the bound holds on all of them.
    assert last >= first + 0.25
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 0.7  # the required gain is about 2.5 standard deviations
    mismatches = [line["mismatch/max_abs_logprob"] for line in lines if "train/loss" in line]
    assert len(mismatches) == 60
    assert max(mismatches) <= 1e-4


def test_export_matches_accuracy_of_trained_model(demo: Path) -> None:
    *_, trained = accuracies(metrics(demo / "grpo"))
    assert compute_accuracies(demo / "results")["val/accuracy"] == pytest.approx(trained, abs=0.01)


@pytest.mark.nightly
def test_reward_raises_accuracy_of_adapter_training(warm_start: Path, tmp_path: Path) -> None:
    options = [f"--set={change}" for change in ("lora.rank=16", "optim.lr=3e-3", "train.max_steps=40")]
    lines = train(warm_start, tmp_path, *options)
    first, *_, last = accuracies(lines)
    assert first <= 0.65
    assert last >= 0.85
    assert max(line["mismatch/max_abs_logprob"] for line in lines if "train/loss" in line) <= 1e-4


@pytest.mark.nightly
def test_shuffled_reward_does_not_raise_accuracy(warm_start: Path, tmp_path: Path) -> None:
    lines = train(
        warm_start,
        tmp_path,
        "--set",
        'reward.functions={"rewards.py:shuffled"=1.0}',
        "--set",
        "train.max_steps=30",
    )
    first, *_, last = accuracies(lines)
    assert last <= first + 0.1
