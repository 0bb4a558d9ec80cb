"""A run folder in which someone has planted files: the commands run none of the planted code, name the file, and show no
traceback."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.checkpoints.marker import write_marker
from tests.integration.command import dsreason
from tests.integration.rows import write_mixed_rows

pytestmark = [pytest.mark.integration, pytest.mark.long]

CONFIG = """
[model]
path = "{model}"
gradient_checkpointing = false
[data]
adapter = "jsonl"
path = "data/rows.jsonl"
[optim]
lr = 1e-3
[validation]
before_training = false
generate = false
[checkpoint]
every = 1
[train]
max_steps = 2
global_batch_size = 2
precision = "fp32"
"""
EXPORT = ("export", "--checkpoint", "run/checkpoints/step_2", "--output", "exported")
RESUME = (
    "sft",
    "--config",
    "run.toml",
    "--output-dir",
    "run",
    "--nproc",
    2,
    "--set",
    "train.max_steps=3",
    "--resume",
    "auto",
)
RESUME_STEP_2 = tuple("run/checkpoints/step_2" if argument == "auto" else argument for argument in RESUME)
MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


class Planted:
    """An object that creates the file named in PLANTED when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ('touch "$PLANTED"',)


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Planted()))


def saved_by_torch(file: Path) -> None:
    torch.save({"module": Planted(), "optimizer_state_dict": Planted()}, file)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """Create a run of two steps on two ranks."""
    folder = tmp_path_factory.mktemp("sound")
    write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen3_vl))
    ended = dsreason("sft", "--config", "run.toml", "--output-dir", "run", "--nproc", 2, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a copy of the run, and check afterwards that no planted code was run."""
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    shutil.copytree(sound, tmp_path / "copy")
    yield tmp_path / "copy"
    assert not (tmp_path / "planted").exists()


def refused(folder: Path, name: str, *arguments: object) -> None:
    ended = dsreason(*arguments, cwd=folder)
    message = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2) and name in message and "Traceback" not in message, (arguments, message)


@pytest.mark.parametrize(
    ("name", "plant", "command"),
    [
        (MODEL, pickled, EXPORT),
        pytest.param(MODEL, saved_by_torch, EXPORT, marks=pytest.mark.nightly),
        pytest.param(OPTIMIZER, saved_by_torch, EXPORT, marks=pytest.mark.nightly),
        pytest.param(OPTIMIZER, saved_by_torch, RESUME, marks=pytest.mark.nightly),
        ("rng_rank_1.safetensors", pickled, RESUME),
    ],
    ids=["model, pickled", "model", "optimizer", "optimizer when resuming", "random state when resuming"],
)
def test_code_in_checkpoint_file_is_not_run(
    folder: Path, name: str, plant: Callable[[Path], None], command: tuple[object, ...]
) -> None:
    checkpoint = folder / "run/checkpoints/step_2"
    assert (checkpoint / name).is_file()
    plant(checkpoint / name)
    write_marker(checkpoint)  # the marker now accepts the planted file as the one that was written
    refused(folder, name, *command)
    assert not (folder / "exported").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "--model", "run", "--data", "data/rows.jsonl", "--adapter", "jsonl"),
        ("infer", "--model", "run", "--image", "data/1_0.png", "--prompt", "Which?"),
        ("sft", "--config", "run.toml", "--set", 'model.path="run/export/final"', "--output-dir", "next", "--nproc", 1),
    ],
    ids=lambda command: command[0],
)
def test_code_in_exported_weights_is_not_run(folder: Path, command: tuple[object, ...]) -> None:
    weights = folder / "run/export/final/model.safetensors"
    pickled(weights)
    refused(folder, weights.name, *command)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (OPTIMIZER, EXPORT),
        pytest.param(MODEL, RESUME_STEP_2, marks=pytest.mark.nightly),
        ("trainer_state.json", (*RESUME_STEP_2, "--dry-run")),
    ],
    ids=["optimizer", "model", "state"],
)
def test_checkpoint_with_mixed_steps_is_rejected(folder: Path, name: str, command: tuple[object, ...]) -> None:
    shutil.copy(folder / "run/checkpoints/step_1" / name, folder / "run/checkpoints/step_2" / name)
    refused(folder, name, *command)
