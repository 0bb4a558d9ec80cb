"""SFT on a real GPU: every shipped DeepSpeed file trains in bf16, and the device's memory is on record."""

from __future__ import annotations

import pytest
import torch

from tests.integration.command import dsreason, metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("deepspeed", ["zero2.json", "zero3.json", "zero3_offload.json"])
def test_built_in_recipe_trains_in_bf16(tmp_path, deepspeed):
    short = ["train.precision=bf16", "train.max_steps=20", "validation.max_samples=32", "checkpoint.export_dtype=bf16"]
    short += ["optim.warmup=4"]  # the recipe's 40 steps would not be over
    options = [part for text in short for part in ("--set", text)]
    ended = dsreason("sft", "--ds-config", deepspeed, "--nproc", 1, "--output-dir", "D", *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, last = metrics(tmp_path / "D")[1], metrics(tmp_path / "D")[-1]
    assert last["train/loss"] < 0.6 * first["train/loss"]  # on a CPU 3.35 after 6.36
    assert 0 < last["memory/train/allocated_gib"] <= last["memory/train/peak_gib"]
    assert (tmp_path / "D/export/final/model.safetensors").is_file()
