"""Distillation on the built-in task with a real vLLM engine: a teacher improves a poor student without any reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

WORSE = """
from data_adapters import builtin as adapter
from dsreason.builtin_task import clips as builtin

builtin.MISLABELLED = (*builtin.MISLABELLED, "Which way does the ball move?")  # 44 of 64 rows
rows, to_sample = adapter.rows, adapter.to_sample
"""


def accuracies(run: Path) -> list[float]:
    return [line["val/accuracy"] for line in metrics(run) if "val/accuracy" in line]


def test_teacher_raises_accuracy_of_student(warm_start: Path, trained_qwen2_5_vl: Path, tmp_path: Path) -> None:
    (tmp_path / "worse.py").write_text(WORSE)
    changes = {"data.adapter": "worse.py", "model.path": f'"{warm_start / "export/final"}"', "train.epochs": 2}
    options = [f"--set={key}={value}" for key, value in changes.items()]
    recipe = ("--config", "builtin_warm_start.toml", *options)
    student = dsreason("sft", *recipe, "--nproc", 2, "--output-dir", "student", cwd=tmp_path, timeout=1800)
    assert student.returncode == 0, student.stderr
    assert accuracies(tmp_path / "student")[-1] < 0.4
    assert accuracies(trained_qwen2_5_vl)[-1] > 0.9

    changes = {
        "model.path": f'"{tmp_path / "student/export/final"}"',
        "distill.teacher": f'"{trained_qwen2_5_vl / "export/final"}"',
        "reward.functions": "{}",
        "grpo.num_generations": 4,
        "grpo.prompts_per_step": 64,
        "train.max_steps": 40,
        "train.micro_batch_size": 64,
    }
    options = [f"--set={key}={value}" for key, value in changes.items()]
    taught = dsreason("grpo", *options, "--nproc", 2, "--output-dir", "taught", cwd=tmp_path, timeout=1800)
    assert taught.returncode == 0, taught.stderr
    first, *_, last = accuracies(tmp_path / "taught")
    assert first < 0.4
    assert last > 0.75
    distances = [line["distill/kl"] for line in metrics(tmp_path / "taught") if "distill/kl" in line]
    assert sum(distances[-10:]) < 0.6 * sum(distances[:10])
    assert (
        max(line["mismatch/max_abs_logprob"] for line in metrics(tmp_path / "taught") if "distill/kl" in line) <= 1e-4
    )
