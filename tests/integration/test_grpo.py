"""`dsreason grpo` through the installed command: what it writes, and that it resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

CONFIG = """
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "{rows}"
workers = 1
vision.fps = 4.0
[optim]
lr = 3e-3
warmup = 0
schedule = "constant"
[train]
epochs = 3
max_steps = 4
micro_batch_size = 8
precision = "fp32"
[grpo]
prompts_per_step = 6
num_generations = 4
optimizer_steps_per_rollout = 2
[rollout]
engine = "transformers"
max_completion_length = 6
temperature = 0.9
[reward.functions]
"rewards.py:vowels" = 1.0
[validation]
before_training = false
generate = false
[checkpoint]
every = 2
keep = -1
"""
REWARDS = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion), {'seen': 1}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """With `whole/`: four steps, two a rollout, on 2 ranks with 3 prompts each; checkpoints after two and four."""
    folder = tmp_path_factory.mktemp("grpo")
    rows = write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen3_vl, rows=rows))
    (folder / "rewards.py").write_text(REWARDS)
    train(folder, "whole")
    return folder


def train(folder: Path, name: str, *options: str) -> Path:
    ended = dsreason("grpo", "--config", "run.toml", "--output-dir", name, "--nproc", 2, *options, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder / name


def rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


def test_two_and_two_steps_equal_four_rollouts_included(folder: Path) -> None:
    resumed = train(folder, "resumed", "--resume", "whole/checkpoints/step_2")
    assert rollouts(resumed, 2) == rollouts(folder / "whole", 2)
    names = ("train/loss", "train/grad_norm", "reward/mean", "mismatch/kl", "policy/clip_fraction")
    before, after = (
        [[line[name] for name in names] for line in metrics(run) if line["step"] > 2]
        for run in (folder / "whole", resumed)
    )
    assert before == after
    expected, found = (load_file(run / "export/final/model.safetensors") for run in (folder / "whole", resumed))
    assert all(expected[name].equal(found[name]) for name in expected)


def test_the_engine_samples_what_the_trainer_trains(folder: Path) -> None:
    steps = [line for line in metrics(folder / "whole") if "mismatch/kl" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    first_of_rollout = [line["mismatch/max_abs_logprob"] for line in steps]
    assert max(first_of_rollout) <= 1e-4


def test_every_completion_is_written_with_its_reward_and_advantage(folder: Path) -> None:
    rows = rollouts(folder / "whole", 0)
    assert len(rows) == 6 * 4
    assert {row["version"] for row in rows} == {0}
    assert all(row["rewards"]["vowels"] == sum(c in "aeiou" for c in row["completion"]) for row in rows)
    for first in range(0, len(rows), 4):
        group = rows[first : first + 4]
        assert len({row["id"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)
    assert len({row["completion"] for row in rows}) > 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", 'reward.functions={"vowles"=1.0}'], ["vowles"]),
        (["--set", "reward.functions={}"], ["reward.functions"]),
        (["--set", "model.max_length=20"], ["rows.jsonl", "max_completion_length"]),
        (["--set", "train.global_batch_size=8"], ["global_batch_size"]),
        (["--set", "grpo.num_generations=1"], ["num_generations"]),
    ],
)
def test_a_mistake_is_named_before_ranks_start(folder: Path, options: list[str], words: list[str]) -> None:
    ended = dsreason("grpo", "--config", "run.toml", "--output-dir", "bad", "--dry-run", *options, cwd=folder)
    assert ended.returncode == 2
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (folder / "bad").exists()
