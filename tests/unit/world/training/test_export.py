"""Exports of checkpoints of world models."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from dsreason.cli import export as command
from dsreason.cli.main import app
from dsreason.errors import CheckpointError
from dsreason.world.base import FILE, describe_base, join_folders
from dsreason.world.training import export


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fake checkpoint of two ranks with parameters a, b and c, of which c is frozen."""
    alive: list[weakref.ref[Tensor]] = []

    def tensors(checkpoint: Path, saved: Any, *, with_frozen: bool) -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b", "c"):
            tensor = torch.zeros(3)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    monkeypatch.setattr(export, "iter_checkpoint_tensors", tensors)
    shape = [3]
    parameters = {name: SimpleNamespace(shape=shape, trained=name != "c") for name in ("a", "b", "c")}
    return SimpleNamespace(parameters=parameters, world_size=2, alive=alive)


def test_averaged_tensors_are_loaded_one_by_one(tmp_path: Path, saved: Any) -> None:
    for rank, part in enumerate([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])]):  # of 3 values, padded
        save_file({"a": part, "b": part + 10}, tmp_path / f"average_ema_rank_{rank}.safetensors")
    result = {}
    for name, tensor in export.iter_saved_tensors(tmp_path, saved, with_frozen=True):
        result[name] = tensor.tolist()
        del tensor
        assert sum(item() is not None for item in saved.alive) <= 1
    assert result == {"a": [1, 2, 3], "b": [11, 12, 13], "c": [0, 0, 0]}


def test_weights_are_exported_if_average_is_missing(tmp_path: Path, saved: Any) -> None:
    saved_tensors = dict(export.iter_saved_tensors(tmp_path, saved, with_frozen=True))
    assert {name: tensor.tolist() for name, tensor in saved_tensors.items()} == dict.fromkeys("abc", [0, 0, 0])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name in ("model_index.json", "transformer/config.json", "scheduler/scheduler_config.json", "vae/config.json"):
        (tmp_path / "base" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "base" / name).write_text("{}")
    (tmp_path / "out").mkdir()
    return tmp_path / "base"


def test_only_index_and_trained_components_are_copied(base: Path, tmp_path: Path) -> None:
    (base / ".env").write_text("sentinel")
    (base / "transformer" / "token").write_text("sentinel")
    export.copy_pipeline(base, tmp_path / "out")
    names = {file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.*")}
    assert names == {"model_index.json", "transformer/config.json", "scheduler/scheduler_config.json"}


@pytest.mark.parametrize("place", ["model_index.json", "transformer/config.json", "scheduler"])
def test_link_leading_outside_world_model_is_refused(base: Path, tmp_path: Path, place: str) -> None:
    (base / place).rename(tmp_path / "secret")
    (base / place).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{base / place}.*: is a link to {tmp_path / 'secret'}"):
        export.copy_pipeline(base, tmp_path / "out")


def test_folder_joined_for_an_export_is_copied(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
    (base / FILE).write_text(describe_base({"path": str(base)}, tmp_path))
    joined = join_folders(base, base, tmp_path / "cache" / "models")
    export.copy_pipeline(joined, tmp_path / "out")
    assert (tmp_path / "out" / "transformer" / "config.json").is_file()


def test_results_dir_is_rejected_for_world_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_world_checkpoint", lambda checkpoint: True)
    options = ["--checkpoint", str(tmp_path), "--output", str(tmp_path / "out"), "--results-dir", str(tmp_path)]
    ended = CliRunner().invoke(app, ["export", *options])
    assert ended.exit_code == 2
    assert "whose model card has no scores" in " ".join(ended.output.split())
