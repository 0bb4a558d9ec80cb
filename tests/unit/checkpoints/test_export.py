"""Model folders written from a few tensors. Exports of engines and checkpoints: tests/integration/test_export.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsreason.checkpoints.export import HEADER_BYTES, write_model_folder
from dsreason.checkpoints.export_digests import DIGESTS_FILE

TENSORS = {name: torch.arange(100.0) + start for start, name in enumerate("abcd")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl", "dtype": "float16", "vision_config": {"torch_dtype": "float16"}})
    )
    (folder / "tokenizer.json").write_text("{}")
    for name in ("model.safetensors", "model.safetensors.index.json", "README.md", ".hidden"):
        (folder / name).write_text("of the base model")
    return folder


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_weights_and_config_have_requested_dtype(
    tmp_path: Path, source: Path, dtype: str, torch_dtype: torch.dtype
) -> None:
    folder = write_model_folder(TENSORS.items(), source, tmp_path / "out", dtype=dtype)
    file = load_file(folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in file.items()} == dict.fromkeys("abcd", torch_dtype)
    for name, tensor in TENSORS.items():
        assert torch.equal(file[name], tensor.to(torch_dtype))
    removeprefix = str(torch_dtype).removeprefix("torch.")
    config = json.loads((folder / "config.json").read_text())
    assert config == {"model_type": "qwen2_5_vl", "dtype": removeprefix, "vision_config": {"torch_dtype": removeprefix}}
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", DIGESTS_FILE, "model.safetensors", "tokenizer.json"]


def test_shards_fit_requested_size_and_are_indexed(tmp_path: Path, source: Path) -> None:
    # Each tensor has 400 bytes of values, so 1300 bytes hold two tensors with their headers, but not three.
    assert 2 * (400 + HEADER_BYTES) + HEADER_BYTES <= 1300 < 3 * 400 + 3 * HEADER_BYTES
    folder = write_model_folder(TENSORS.items(), source, tmp_path / "out", dtype="fp32", max_shard_size="1.3KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {
        "metadata": {"total_size": 1600},
        "weight_map": {"a": first, "b": first, "c": second, "d": second},
    }
    assert all((folder / name).stat().st_size <= 1300 for name in (first, second))


def test_oversized_tensor_gets_its_own_shard(tmp_path: Path, source: Path) -> None:
    folder = write_model_folder(TENSORS.items(), source, tmp_path / "out", dtype="fp32", max_shard_size="0.1KB")
    assert len(list(folder.glob("*.safetensors"))) == 4
