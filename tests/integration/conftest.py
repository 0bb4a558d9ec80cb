"""Runs of the built-in task that several test files look at: each takes minutes, and is done once per session."""

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
def trained_qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_builtin(tmp_path_factory, "--ds-config", "zero3.json")


@pytest.fixture(scope="session")
def trained_qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_builtin(tmp_path_factory, "--set", "model.path=tiny:qwen3_vl")


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on rows of which half are mislabelled."""
    return train_builtin(tmp_path_factory, "--config", "builtin_warm_start.toml")
