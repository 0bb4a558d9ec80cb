"""A run's folder that somebody has been at: the real commands run no code of it, name the file, and show no traceback."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.checkpoints.checkpoint_folder import write_marker
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
KINDS = {".pt": ("plain", "zip"), ".safetensors": ("plain",)}


class Planted:
    """Unpickling this makes a file, whose name is in PLANTED."""

    def __reduce__(self) -> Any:
        return os.system, ('touch "$PLANTED"',)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """A run of two steps on two ranks."""
    folder = tmp_path_factory.mktemp("sound")
    write_mixed_rows(folder / "data")
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen3_vl))
    ended = dsreason("sft", "--config", "run.toml", "--output-dir", "run", "--nproc", 2, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy, after whose use no planted code has run."""
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    shutil.copytree(sound, tmp_path / "copy")
    yield tmp_path / "copy"
    assert not (tmp_path / "planted").exists()


def plant(file: Path, kind: str) -> None:
    if kind == "zip":
        torch.save({"module": Planted(), "optimizer_state_dict": Planted()}, file)
    else:
        file.write_bytes(pickle.dumps(Planted()))


def refused(folder: Path, name: str, *arguments: object) -> None:
    ended = dsreason(*arguments, cwd=folder)
    told = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2) and name in told and "Traceback" not in told, (arguments, told)


def test_code_in_the_files_of_a_checkpoint_is_not_run(folder: Path) -> None:
    checkpoint = folder / "run/checkpoints/step_2"
    files = [file for file in sorted(checkpoint.iterdir()) if file.suffix in KINDS]
    assert len(files) == 6  # of each rank its model, its optimizer and its random state
    export = ("export", "--checkpoint", "run/checkpoints/step_2", "--output", "exported")
    resume = (
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
    )
    for file in files:
        content = file.read_bytes()
        for kind in KINDS[file.suffix]:
            plant(file, kind)
            refused(folder, file.name, *export)  # not the file that was written
            write_marker(checkpoint)
            if not file.name.startswith("rng_"):
                refused(folder, file.name, *export)
        if "rank_1_" in file.name or "rng_rank_0" in file.name:
            refused(folder, file.name, *resume, "auto")
        file.write_bytes(content)
        write_marker(checkpoint)
    assert not (folder / "exported").exists()


def test_code_in_the_weights_of_an_export_is_not_run(folder: Path) -> None:
    weights = folder / "run/export/final/model.safetensors"
    plant(weights, "plain")
    refused(folder, weights.name, "eval", "--model", "run", "--data", "data/rows.jsonl", "--adapter", "jsonl")
    refused(folder, weights.name, "infer", "--model", "run", "--image", "data/1_0.png", "--prompt", "Which?")
    refused(folder, weights.name, "sft", "--config", "run.toml", "--set", 'model.path="run/export/final"', "--nproc", 1)


def test_a_checkpoint_mixed_of_two_steps_is_refused(folder: Path) -> None:
    earlier, later = (folder / f"run/checkpoints/step_{step}" for step in (1, 2))
    for name in (
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "trainer_state.json",
    ):
        content = (later / name).read_bytes()
        shutil.copy(earlier / name, later / name)
        refused(folder, name, "export", "--checkpoint", later, "--output", "exported")
        refused(folder, name, "sft", "--config", "run.toml", "--output-dir", "run", "--resume", "auto", "--dry-run")
        (later / name).write_bytes(content)
    shutil.copytree(later, later.with_name("step_9"))
    refused(
        folder, "holds the checkpoint of step 2", "export", "--checkpoint", later.with_name("step_9"), "--output", "e"
    )
