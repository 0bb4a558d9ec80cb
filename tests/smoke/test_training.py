"""Part of `make smoke`: two steps of SFT and of GRPO on two ranks, with the real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason, metrics

pytestmark = pytest.mark.integration

SHORT = (
    *("train.max_steps=2", "train.micro_batch_size=4"),
    *("validation.max_samples=4", "validation.before_training=false"),
)


def run(folder: Path, *arguments: object) -> str:
    """Run a command that must succeed, and return its output."""
    ended = dsreason(*arguments, cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def train(folder: Path, command: str, *settings: str) -> Path:
    options = [f"--set={setting}" for setting in (*SHORT, *settings)]
    run(folder, command, "--nproc", 2, "--output-dir", command, *options)
    return folder / command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smoke")


@pytest.fixture(scope="module")
def sft(folder: Path) -> Path:
    return train(folder, "sft", "train.global_batch_size=8")


def test_sft_trains_and_its_export_answers_questions(sft: Path, folder: Path) -> None:
    assert [line["step"] for line in metrics(sft)] == [1, 2]
    run(
        folder,
        *("eval", "--config", "builtin_eval.toml", "--model", "sft", "--set", "model.engine=transformers"),
        *("--limit", 2, "--results-dir", "results"),
    )
    assert "accuracy" in run(folder, "score", "--results-dir", "results")


def test_grpo_trains_sft_export_with_vllm(sft: Path, folder: Path) -> None:
    model = f'model.path="{sft / "export" / "final"}"'
    grpo = train(folder, "grpo", model, "grpo.prompts_per_step=4", "grpo.kl_coef=0.01", "monitor.profile=[2]")
    assert [line["step"] for line in metrics(grpo)] == [1, 2]
    assert "generate" in (grpo / "profile" / "step_2.txt").read_text()
    assert (grpo / "export" / "final" / "model.safetensors").is_file()
