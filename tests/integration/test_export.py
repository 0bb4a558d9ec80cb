"""Exported folders: transformers reproduces the logits of the trained model, and vLLM serves the folders."""

from __future__ import annotations

import json
import re
import shutil
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsreason.errors import CheckpointError
from tests.distributed import run_on_ranks
from tests.integration.command import dsreason
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import first_step, run_config
from tests.integration.test_positions_vllm import VIDEOS, ask_vllm, encode, generate

pytestmark = pytest.mark.integration

STAGES = ("zero3", "zero2")
CASES = ("text", "image", "video at 4 fps")
SHARD = "1.2MB"


def engine_logits(engine: Any, processor: Any) -> dict[str, np.ndarray]:
    """Return the logits of the policy while it is being trained."""
    import deepspeed

    from tests.positions import patch_positions

    model, result = engine.module.model, {}
    patch_positions(model)
    for name in CASES:
        with torch.no_grad():
            hidden = model.model(**encode(processor, name)).last_hidden_state
            with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
                result[name] = torch.nn.functional.linear(hidden, model.lm_head.weight).numpy().copy()
    return result


def train_and_export(rows: str, model: str, folder: str) -> dict[str, dict[str, np.ndarray]]:
    """Under each ZeRO stage, train a few large steps with a frozen vision tower, then write a checkpoint and an export."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.export import export_engine
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import init_world
    from dsreason.models.processors.loading import load_processor
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import save_checkpoint

    world, result = init_world(), {}
    for stage in STAGES:
        config = run_config(rows, model, {})
        frozen = config.model.model_copy(update={"freeze": ("visual",)})
        config = config.model_copy(update={"model": frozen, "deepspeed": f"{stage}.json"})
        engine, batches = first_step(config, Path(model), world)
        set_learning_rate(engine, 1e-2)
        for _ in range(3):
            accumulate_gradients(engine, batches, world)
            engine.step()
        result[stage] = engine_logits(engine, load_processor(Path(model)))
        save_checkpoint(engine, Path(folder) / stage, 3, TrainerState(step=3, model_path=model), world)
        output = Path(folder) / f"{stage}_engine"
        export_engine(engine, Path(model), output, world, dtype="fp32", max_shard_size=SHARD)
        engine.destroy()
    return result


def reopen(folder: str) -> dict[str, Any]:
    """Return the logits and greedy texts of an exported folder, computed by transformers and by a real vLLM engine."""
    import os

    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tests.positions import patch_positions

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    assert model.dtype == torch.float32
    patch_positions(model)
    processor = AutoProcessor.from_pretrained(folder)
    with torch.no_grad():
        logits = {name: model(**encode(processor, name)).logits.numpy() for name in CASES}
    return {"logits": logits, "text": generate(model, processor)} | ask_vllm(folder, "float32", list(VIDEOS))


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("export")
    rows = write_mixed_rows(folder / "rows")
    logits, _ = run_on_ranks(train_and_export, 2, str(rows), str(tiny), str(folder))
    return folder, logits


@pytest.fixture(scope="module")
def reopened(trained: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return run_on_ranks(reopen, 1, str(trained[0] / "zero3_engine"))[0]


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_reopened_logits_match_trained_model(trained: tuple[Path, dict[str, Any]], reopened: dict[str, Any]) -> None:
    for name in CASES:
        # transformers embeds patches with a convolution, training with a matrix product; the results differ only by
        # rounding.
        assert np.abs(reopened["logits"][name] - trained[1]["zero3"][name]).max() <= 1e-5


def test_vllm_and_transformers_generate_equal_text(reopened: dict[str, Any]) -> None:
    assert reopened["text"] == reopened["vllm_generated"]


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_export_matches_engine_export(
    trained: tuple[Path, dict[str, Any]], stage: str, tiny: Path, tmp_path: Path
) -> None:
    from dsreason.checkpoints.export import export_checkpoint

    output = export_checkpoint(trained[0] / stage / "step_3", tmp_path / "out", max_shard_size=SHARD)
    live, saved, base = all_tensors(trained[0] / f"{stage}_engine"), all_tensors(output), all_tensors(tiny)
    assert live.keys() == saved.keys()
    assert len(saved) == len(base)
    for name, tensor in saved.items():
        assert torch.equal(tensor, live[name]), name
    assert {path.name for path in tiny.iterdir() if path.suffix != ".safetensors"} <= {p.name for p in output.iterdir()}


def test_two_exports_into_a_folder_do_not_mix(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from dsreason.checkpoints.export_digests import check_digests

    stages = dict(zip(STAGES, ("1.2MB", "2MB"), strict=True))  # two models with other shards
    options = [
        ["--checkpoint", trained[0] / stage / "step_3", "--max-shard-size", size] for stage, size in stages.items()
    ]
    with ThreadPool(2) as threads:
        ended = threads.map(lambda o: dsreason("export", *o, "--output", tmp_path / "out", cwd=tmp_path), options)
    assert sorted(process.returncode for process in ended) == [0, 2], [process.stderr for process in ended]
    refused = max(ended, key=lambda process: process.returncode)
    assert re.search(r"out: (cannot be written now: .* in use by process|exists and is not empty)", refused.stderr)
    winner = STAGES[[process.returncode for process in ended].index(0)]
    check_digests(tmp_path / "out")
    live = all_tensors(trained[0] / f"{winner}_engine")
    assert all(torch.equal(tensor, live[name].bfloat16()) for name, tensor in all_tensors(tmp_path / "out").items())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_exported_shards_respect_size_limit(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0] / "zero3_engine"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards == sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert set(index["weight_map"]) == set(all_tensors(folder))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in all_tensors(folder).values())
    assert all((folder / name).stat().st_size <= 1_200_000 for name in shards)


def test_bf16_export_can_be_loaded_for_training(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from dsreason.checkpoints.export import export_checkpoint
    from dsreason.models.load import load_model

    output = export_checkpoint(trained[0] / "zero2" / "step_3", tmp_path / "out", dtype="bf16")
    assert [path.name for path in output.glob("*.safetensors")] == ["model.safetensors"]
    config = json.loads((output / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    model = load_model(output, dtype=torch.bfloat16)
    exact = all_tensors(trained[0] / "zero2_engine")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, exact[name].bfloat16()), name


def test_export_rejects_nonempty_folder_and_missing_base(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from dsreason.checkpoints.checkpoint_folder import write_marker
    from dsreason.checkpoints.export import export_checkpoint

    checkpoint = trained[0] / "zero3" / "step_3"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="full: exists and is not empty"):
        export_checkpoint(checkpoint, tmp_path / "full")
    moved = shutil.copytree(checkpoint, tmp_path / "step_3")
    state = moved / "trainer_state.json"
    state.write_text(state.read_text().replace(json.loads(state.read_text())["state"]["model_path"], str(tmp_path)))
    write_marker(moved)
    with pytest.raises(CheckpointError, match="config.json is missing"):
        export_checkpoint(moved, tmp_path / "out")
    assert not (tmp_path / "out").exists()
