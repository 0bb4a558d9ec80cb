"""Runs of the built-in task that several test files look at: each takes minutes, and is done once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import dsreason

SHORT = ("--set", "train.epochs=6")
"""Of the recipe's 9, which make sure of the last percent."""


def train_builtin(factory: pytest.TempPathFactory, *options: object) -> Path:
    """The folder of a finished `dsreason sft` on two ranks."""
    folder = factory.mktemp("builtin")
    ended = dsreason("sft", "--nproc", 2, "--output-dir", "D", *options, cwd=folder, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    return folder / "D"


@pytest.fixture(scope="session")
def trained_qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_builtin(tmp_path_factory, "--ds-config", "zero3.json", *SHORT)


@pytest.fixture(scope="session")
def trained_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_builtin(tmp_path_factory, "--set", "model.path=tiny:qwen3_vl", *SHORT)


@pytest.fixture(scope="session")
def warm_start(trained_qwen2_5_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wrong about half of the questions: a model that has learned to see, trained on for 2 epochs of mislabelled rows.

    `dsreason demo` trains its own from a random model, which takes five times as long.
    """
    learned = f'model.path="{trained_qwen2_5_vl / "export" / "final"}"'
    return train_builtin(
        tmp_path_factory, "--config", "builtin_warm_start.toml", "--set", learned, "--set", "train.epochs=2"
    )


@pytest.fixture(scope="session")
def demo_warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `dsreason demo` trains it."""
    return train_builtin(tmp_path_factory, "--config", "builtin_warm_start.toml")
