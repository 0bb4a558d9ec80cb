"""World models on a real GPU: sampling and training agree in bf16, and what is exported is loaded by diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.command import dsreason, metrics
from tests.integration.test_world import RUN

diffusers = pytest.importorskip("diffusers", reason="the packages of world models are an extra")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("algorithm", ["flow_grpo", "nft"])
@pytest.mark.parametrize("deepspeed", ["zero2.json", "zero3.json"])
def test_a_run_in_bf16_trains_and_exports(tmp_path: Path, algorithm: str, deepspeed: str) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    settings = [f"world.algorithm={algorithm}", "train.precision=bf16", "checkpoint.export_dtype=bf16"]
    options = [part for text in settings for part in ("--set", text)]
    arguments = ("--config", "run.toml", "--ds-config", deepspeed, "--nproc", 1, "--output-dir", "D")
    ended = dsreason("world", *arguments, *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr  # FlowGRPO stops by itself where the first ratio is not 1
    last = metrics(tmp_path / "D")[-1]
    assert last["train/grad_norm"] > 0
    assert 0 < last["memory/train/allocated_gib"] <= last["memory/train/peak_gib"]
    folder = tmp_path / "D/export/final/transformer"
    weights = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert set(diffusers.CosmosTransformer3DModel.from_pretrained(folder).state_dict()) == set(weights)
