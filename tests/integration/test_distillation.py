"""Runs of `dsreason grpo` with a teacher and no reward: they resume exactly, do not depend on the batch split, and are
checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dsreason.models.tiny import build_tiny
from tests.distributed import run_on_ranks
from tests.integration.command import metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

RUN = """
deepspeed = "zero3.json"
[model]
path = "{folder}/student"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "{folder}/data/rows.jsonl"
workers = 0
vision.fps = 4.0
[optim]
lr = 1e-3
warmup = 0
schedule = "constant"
[train]
epochs = 9
max_steps = 4
precision = "fp32"
[grpo]
num_generations = 1
prompts_per_step = 4
kl_coef = 0.0
optimizer_steps_per_rollout = 2
[distill]
teacher = "{folder}/teacher"
discount = 0.5
[rollout]
engine = "transformers"
max_completion_length = 6
temperature = 0.9
self_test = false
[validation]
before_training = false
generate = false
[checkpoint]
every = 2
keep = -1
"""


def run_grpo(file: str, output_dir: str, resume: str | None, changes: tuple[str, ...]) -> None:
    """Run `dsreason grpo` the way one of its ranks does."""
    from dsreason.cli.job import TrainingCommand, find_trainers, load_job

    trainer = find_trainers()["grpo"]
    trainer.run(load_job(TrainingCommand(trainer, Path(file), overrides=changes)), Path(output_dir), resume)


def train(folder: Path, name: str, *changes: str, ranks: int = 2, resume: str | None = None) -> list[dict[str, Any]]:
    """Run GRPO with `changes` to the settings, and return the metrics of its steps."""
    out = folder / name
    run_on_ranks(run_grpo, ranks, str(folder / "run.toml"), str(out), resume and str(folder / resume), changes)
    return steps_of(out)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "train/loss" in line]


ONE_STEP = ("grpo.optimizer_steps_per_rollout=1", "train.max_steps=1", "checkpoint.every=0", 'checkpoint.export="none"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """Return a folder with a finished run in `whole/`, which has four steps on two ranks, and two steps per rollout."""
    folder = tmp_path_factory.mktemp("distillation")
    write_mixed_rows(folder / "data")
    shutil.copytree(tiny_qwen3_vl, folder / "student")
    build_tiny("qwen3_vl", folder / "teacher", seed=1, hidden_size=64, num_layers=3)
    (folder / "run.toml").write_text(RUN.format(folder=folder))
    train(folder, "whole")
    return folder


@pytest.fixture(scope="module")
def first_step(folder: Path) -> dict[str, Any]:
    """Return the metrics of the first step on two ranks, with the unchanged settings of the file."""
    return train(folder, "first", *ONE_STEP)[0]


def test_resumed_run_matches_full_run_exactly(folder: Path) -> None:
    full, resumed = steps_of(folder / "whole"), train(folder, "resumed", resume="whole/checkpoints/step_2")
    names = ("train/loss", "train/grad_norm", "distill/kl")
    assert [[line[name] for name in names] for line in resumed if line["step"] > 2] == [
        [line[name] for name in names] for line in full if line["step"] > 2
    ]
    expected, result = (load_file(folder / name / "export/final/model.safetensors") for name in ("whole", "resumed"))
    assert all(expected[name].equal(result[name]) for name in expected)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, (), id="one rank"),
        pytest.param(2, ("train.packing=false", "train.micro_batch_size=1"), id="padded"),
        pytest.param(2, ("train.sequence_parallel_size=2",), id="ranks that share rows"),
        pytest.param(2, ('deepspeed="zero2.json"',), id="a whole student"),
    ],
)
def test_first_step_does_not_depend_on_batch_split(
    folder: Path, first_step: dict[str, Any], ranks: int, changes: tuple[str, ...]
) -> None:
    (result,) = train(folder, f"cut-{ranks}-{len(changes)}-{changes[:1]}", *ONE_STEP, *changes, ranks=ranks)
    assert first_step["distill/kl"] > 0.01
    for name in ("distill/kl", "train/loss", "train/grad_norm"):
        assert result[name] == pytest.approx(first_step[name], rel=1e-4, abs=1e-6), name


def test_student_learns_nothing_from_identical_teacher(folder: Path) -> None:
    changes = (f'distill.teacher="{folder / "student"}"', "rollout.temperature=1.0")
    (result,) = train(folder, "own", *ONE_STEP, *changes)
    assert abs(result["distill/kl"]) <= 1e-6
    assert result["train/grad_norm"] <= 1e-4


def test_teacher_advantages_are_added_to_reward_advantages(folder: Path, first_step: dict[str, Any]) -> None:
    """Give every completion the same reward, so that the reward itself contributes no gradient."""
    (folder / "rewards.py").write_text("def same(completion, sample):\n    return 1.0\n")
    rewards = f'reward.functions={{"{folder}/rewards.py:same"=1.0}}'
    item, two = (
        train(folder, f"coef{coef}", *ONE_STEP, rewards, "grpo.num_generations=2", f"distill.coef={coef}")[0]
        for coef in (1.0, 2.0)
    )
    assert item["reward/mean"] == 1
    assert item["distill/kl"] == two["distill/kl"]
    assert item["train/grad_norm"] > 1e-3
    assert two["train/grad_norm"] == pytest.approx(2 * item["train/grad_norm"], rel=1e-4)


def test_resume_is_rejected_when_teacher_changed(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "teacher", tmp_path / "teacher")
    build_tiny("qwen3_vl", folder / "teacher", seed=2)
    try:
        with pytest.raises(AssertionError, match="has fingerprint .*, but the teacher at the checkpoint had"):
            train(folder, "refused", resume="whole/checkpoints/step_2")
    finally:
        shutil.rmtree(folder / "teacher")
        shutil.move(tmp_path / "teacher", folder / "teacher")


def test_adapters_also_learn_from_teacher(folder: Path) -> None:
    result = train(folder, "adapters", "lora.rank=4", "lora.alpha=8", *ONE_STEP)
    assert result[0]["train/grad_norm"] > 1e-4
