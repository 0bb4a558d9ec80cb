"""Runs of the built-in task that several test files share: each run takes minutes, so it is done once per session.

`TRAINED` in tests/conftest.py names the files that use these runs; with pytest-xdist, all of them run in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason


def train_builtin(factory: pytest.TempPathFactory, *options: object) -> Path:
    """Run `dsreason sft` on the built-in task with two ranks, and return the folder of the finished run."""
    folder = factory.mktemp("builtin")
    ended = dsreason("sft", "--nproc", 2, "--output-dir", "D", *options, cwd=folder, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    return folder / "D"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished `dsreason demo` on two ranks, with the subfolders `sft`, `grpo`, `export` and `results`."""
    folder = tmp_path_factory.mktemp("demo")
    ended = dsreason("demo", "--nproc", 2, "--output-dir", "D", cwd=folder, timeout=2400)
    assert ended.returncode == 0, ended.stderr
    return folder / "D"


@pytest.fixture(scope="session")
def warm_start(demo: Path) -> Path:
    """Return the folder of the demo's SFT run, whose model answers about half of the questions incorrectly."""
    return demo / "sft"


@pytest.fixture(scope="session")
def trained_qwen2_5_vl(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the warm start, which can already see, for two more epochs on correct answers; a new model would need six."""
    learned = f'model.path="{warm_start / "export" / "final"}"'
    return train_builtin(tmp_path_factory, "--ds-config", "zero3.json", "--set", learned, "--set", "train.epochs=2")


@pytest.fixture(scope="session")
def trained_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a Qwen3-VL model for two epochs: it differs clearly from a random model, but does not solve the task well yet."""
    return train_builtin(tmp_path_factory, "--set", "model.path=tiny:qwen3_vl", "--set", "train.epochs=2")


@pytest.fixture(scope="session")
def trained_adapters(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train adapters on the warm start for two epochs of correct answers."""
    learned = f'model.path="{warm_start / "export" / "final"}"'
    changes = (learned, "lora.rank=16", "optim.lr=3e-3", "optim.warmup=10", "train.epochs=2")
    return train_builtin(tmp_path_factory, *(f"--set={change}" for change in changes))
