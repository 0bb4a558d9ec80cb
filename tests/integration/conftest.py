"""Runs of the built-in task that several test files look at: each takes minutes, and is done once per session.

`TRAINED` of tests/conftest.py names the files that use them: with pytest-xdist, one process runs these.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason


def train_builtin(factory: pytest.TempPathFactory, *options: object) -> Path:
    """The folder of a finished `dsreason sft` on two ranks."""
    folder = factory.mktemp("builtin")
    ended = dsreason("sft", "--nproc", 2, "--output-dir", "D", *options, cwd=folder, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    return folder / "D"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished `dsreason demo` on two ranks: `sft`, `grpo`, `export` and `results`."""
    folder = tmp_path_factory.mktemp("demo")
    ended = dsreason("demo", "--nproc", 2, "--output-dir", "D", cwd=folder, timeout=2400)
    assert ended.returncode == 0, ended.stderr
    return folder / "D"


@pytest.fixture(scope="session")
def warm_start(demo: Path) -> Path:
    """The demo's SFT run, which ends wrong about half of the questions."""
    return demo / "sft"


@pytest.fixture(scope="session")
def trained_qwen2_5_vl(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm start, which has learned to see, trained on for 2 epochs of right answers. From nothing it takes 6."""
    learned = f'model.path="{warm_start / "export" / "final"}"'
    return train_builtin(tmp_path_factory, "--ds-config", "zero3.json", "--set", learned, "--set", "train.epochs=2")


@pytest.fixture(scope="session")
def trained_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far from a random model, though not yet good at the task."""
    return train_builtin(tmp_path_factory, "--set", "model.path=tiny:qwen3_vl", "--set", "train.epochs=2")


@pytest.fixture(scope="session")
def trained_adapters(warm_start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters on the warm start, trained for 2 epochs of right answers."""
    learned = f'model.path="{warm_start / "export" / "final"}"'
    changes = (learned, "lora.rank=16", "optim.lr=3e-3", "optim.warmup=10", "train.epochs=2")
    return train_builtin(tmp_path_factory, *(f"--set={change}" for change in changes))
