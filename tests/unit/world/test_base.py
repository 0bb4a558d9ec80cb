"""Exports that name their base model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsreason.errors import CheckpointError
from dsreason.world.base import FILE, describe_base
from dsreason.world.models import resolve_world_model
from dsreason.world.schema import WorldModelConfig


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export of a run that started from `base/`."""
    base, made = tmp_path / "base", tmp_path / "export"
    for part in ("transformer", "vae", "tokenizer", "scheduler"):
        (base / part).mkdir(parents=True)
        (base / part / "origin").write_text("base")
    index = json.dumps({"_class_name": "Cosmos2_5_PredictBasePipeline"})
    (base / "model_index.json").write_text(index)
    (made / "transformer").mkdir(parents=True)
    (made / "transformer" / "origin").write_text("export")
    (made / "model_index.json").write_text(index)
    (made / FILE).write_text(describe_base({"path": str(base)}, base))
    return made


def resolve(path: Path, cache: Path) -> Path:
    return resolve_world_model(WorldModelConfig(path=str(path)), cache)


def test_export_is_joined_with_base_model(export: Path, tmp_path: Path) -> None:
    folder = resolve(export, tmp_path / "cache")
    origins = {part.name: (part / "origin").read_text() for part in folder.iterdir() if (part / "origin").is_file()}
    assert origins == {"transformer": "export", "vae": "base", "tokenizer": "base", "scheduler": "base"}
    assert resolve(export, tmp_path / "cache") == folder


def test_export_of_export_names_the_original_model(export: Path, tmp_path: Path) -> None:
    joined = resolve(export, tmp_path / "cache")
    assert json.loads(describe_base({"path": str(export)}, joined))["path"] == str(tmp_path / "base")


def test_hub_name_stays_and_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert json.loads(describe_base({"path": "nvidia/x", "revision": "r"}, tmp_path)) == {
        "path": "nvidia/x",
        "revision": "r",
    }
    assert json.loads(describe_base({"path": "mine", "revision": None}, tmp_path))["path"] == str(tmp_path / "mine")
    assert json.loads(describe_base({}, tmp_path))["path"] == str(tmp_path)


def test_missing_base_model_error_explains_fix(export: Path, tmp_path: Path) -> None:
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf'{FILE}: .*set "path" to the current location of the model'):
        resolve(export, tmp_path / "cache")


def test_training_from_an_adapter_export_is_rejected(export: Path, tmp_path: Path) -> None:
    (export / "transformer" / "origin").unlink()
    (export / "transformer").rmdir()
    with pytest.raises(CheckpointError, match="is an export of an adapter"):
        resolve(export, tmp_path / "cache")


def test_complete_folder_is_used_unchanged(export: Path, tmp_path: Path) -> None:
    assert resolve(tmp_path / "base", tmp_path / "cache") == tmp_path / "base"


def test_export_that_names_another_export_is_rejected(export: Path, tmp_path: Path) -> None:
    """Check an export that names itself as its base, which would cause endless recursion."""
    (export / FILE).write_text(json.dumps({"path": str(export)}))
    with pytest.raises(
        CheckpointError, match='names another export, .*; set "path" to the model from which that was trained'
    ):
        resolve(export, tmp_path / "cache")


def test_only_known_keys_of_note_are_copied(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"password": "sentinel", "path": "user/name"}')
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / FILE).symlink_to(tmp_path / "secret.json")
    assert json.loads(describe_base({}, tmp_path / "base")) == {"path": "user/name", "revision": None}
