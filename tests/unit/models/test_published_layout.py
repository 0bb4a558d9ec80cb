"""Folders whose root index lists weights in subfolders, as Cosmos3 is published: from disk, from the Hub and from S3."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from dsreason.checkpoints.export import rename_for_export, write_model_folder
from dsreason.config.schema import ModelConfig
from dsreason.errors import CheckpointError
from dsreason.families import FAMILIES
from dsreason.models import weights
from dsreason.models.folder import compute_fingerprint
from dsreason.models.load import load_model, resolve_model
from dsreason.models.tiny import build_tiny
from tests.published_layout import write_published_layout

INDEX = "model.safetensors.index.json"
TRANSFORMER = "transformer/diffusion_pytorch_model-0000{}-of-00002.safetensors"
NEEDED = [TRANSFORMER.format(1), TRANSFORMER.format(2), "vision_encoder/model.safetensors"]


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("cosmos3_omni", tmp_path_factory.mktemp("models") / "flat")


@pytest.fixture
def published(flat: Path, tmp_path: Path) -> Path:
    return write_published_layout(flat, tmp_path / "published")


def read_names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def edit_index(folder: Path, **entries: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"] | entries}))


def test_parameters_equal_the_flat_folder(flat: Path, published: Path) -> None:
    result, expected = (load_model(item, dtype=torch.float32).state_dict() for item in (published, flat))
    assert result.keys() == expected.keys()
    assert all(result[name].equal(expected[name]) for name in expected)


def test_only_reasoner_tensors_are_read(flat: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    class Counted:
        def __init__(self, file: Path, **options: Any) -> None:
            self.tensors = weights_open(file, **options)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None: ...

        def keys(self) -> list[str]:
            return list(self.tensors.keys())

        def get_slice(self, name: str) -> Any:  # shape and dtype, from the header
            return self.tensors.get_slice(name)

        def get_tensor(self, name: str) -> torch.Tensor:
            reads.append(name)
            return self.tensors.get_tensor(name)

    weights_open = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", Counted)
    model = load_model(published, dtype=torch.float32)
    stored = load_file(flat / "model.safetensors")
    generator = {name for name in stored if FAMILIES["cosmos3_omni"].rename(name) is None}
    assert len(generator) == 7
    assert sorted(reads) == sorted(stored.keys() - generator)  # each once
    num_bytes = sum(stored[name].nbytes for name in reads)
    assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())


def test_missing_file_is_named(published: Path) -> None:
    (published / NEEDED[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{NEEDED[1]} is missing, but is listed in the index"):
        load_model(published, dtype=torch.float32)


def test_truncated_file_is_named(published: Path) -> None:
    (published / NEEDED[2]).write_bytes((published / NEEDED[2]).read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=rf"{NEEDED[2]} is truncated or damaged"):
        load_model(published, dtype=torch.float32)


def test_unlisted_file_is_named(published: Path) -> None:
    index = json.loads((published / INDEX).read_text())
    listed = {name: file for name, file in index["weight_map"].items() if file != NEEDED[2]}
    (published / INDEX).write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError, match=rf"missing: model\.visual(.|\n)*does not list {NEEDED[2]}"):
        load_model(published, dtype=torch.float32)


@pytest.mark.parametrize("name", ["../other.safetensors", "transformer/../../x.safetensors", "/tmp/x.safetensors"])
def test_index_entry_outside_folder_is_rejected(published: Path, name: str) -> None:
    edit_index(published, extra=name)
    with pytest.raises(CheckpointError, match=rf"{INDEX} lists files outside its folder: {name}"):
        load_model(published, dtype=torch.float32)


@pytest.mark.parametrize("linked", ["vision_encoder", "vision_encoder/model.safetensors"])
def test_link_out_of_folder_is_rejected(published: Path, tmp_path: Path, linked: str) -> None:
    (published / linked).rename(tmp_path / "private")
    (published / linked).symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=r"vision_encoder/model\.safetensors: is a link to .*/private"):
        load_model(published, dtype=torch.float32)


def test_fifo_in_subfolder_is_rejected(published: Path) -> None:
    (published / NEEDED[0]).unlink()
    os.mkfifo(published / NEEDED[0])
    with pytest.raises(CheckpointError, match=rf"{NEEDED[0]}: cannot be read"):
        resolve_model(ModelConfig(path=str(published)), published)


def test_fingerprint_depends_on_weights_in_subfolders(published: Path) -> None:
    fingerprint = compute_fingerprint(published)
    save_file({"encoder.weight": torch.ones(2)}, published / "vae/diffusion_pytorch_model.safetensors")
    assert compute_fingerprint(published) == fingerprint
    tensors = load_file(published / NEEDED[2])
    save_file(tensors | {"pos_embed.weight": tensors["pos_embed.weight"] + 1}, published / NEEDED[2])
    assert compute_fingerprint(published) != fingerprint


def test_hub_download_takes_only_needed_weights(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, calls = tmp_path / ("c" * 40), []

    def download(name: str, *, revision: str, **patterns: list[str]) -> str:
        calls.append((name, revision))
        for file in filter_repo_objects(read_names(published), **patterns):
            (commit / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(published / file, commit / file)
        return str(commit)

    monkeypatch.setattr("dsreason.files.hub.snapshot_download", download)
    assert resolve_model(ModelConfig(path="nvidia/Cosmos3-Nano", revision="v1"), tmp_path) == commit
    assert calls == [("nvidia/Cosmos3-Nano", "v1"), ("nvidia/Cosmos3-Nano", "c" * 40)]
    assert [name for name in read_names(commit) if name.endswith(".safetensors")] == NEEDED
    load_model(commit, dtype=torch.float32)


def test_s3_fetch_takes_only_needed_weights(
    flat: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(address: str, is_wanted: Any) -> Path:
        source = flat if address.endswith("flat") else published
        copy = tmp_path / f"copy_{len(list(tmp_path.glob('copy_*')))}"
        for name in filter(is_wanted, read_names(source)):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, copy / name)
        return copy

    monkeypatch.setattr("dsreason.models.folder.fetch_folder", fetch)
    folder = resolve_model(ModelConfig(path="s3://bucket/published"), tmp_path)
    assert [name for name in read_names(folder) if "/" in name] == NEEDED
    load_model(folder, dtype=torch.float32)
    assert read_names(resolve_model(ModelConfig(path="s3://bucket/flat"), tmp_path)) == read_names(flat)
    assert len(list(tmp_path.glob("copy_*"))) == 3  # a flat folder is fetched in one step


def test_export_is_self_contained(flat: Path, published: Path, tmp_path: Path) -> None:
    model = load_model(published, dtype=torch.float32)
    tensors = rename_for_export(model.named_parameters(), published)
    export = write_model_folder(tensors, published, tmp_path / "export", dtype="fp32", max_shard_size="1MB")
    assert not any("/" in name for name in read_names(export))
    listed = json.loads((export / INDEX).read_text())["weight_map"]
    family = FAMILIES["cosmos3_omni"]
    assert listed.keys() == {name for name in load_file(flat / "model.safetensors") if family.rename(name)}
    shutil.rmtree(published)
    expected = dict(load_model(flat, dtype=torch.float32).named_parameters())
    for result in (load_model(export, dtype=torch.float32), AutoModelForImageTextToText.from_pretrained(export)):
        assert all(parameter.equal(expected[name]) for name, parameter in result.named_parameters())
