"""Cosmos3's reasoner, trained with the installed command: vLLM samples from it, and its export has the published tensor names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dsreason.families import FAMILIES
from dsreason.models.load import load_model
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

CONFIG = """
[model]
path = "tiny:cosmos3_omni"
[data]
adapter = "jsonl"
path = "{rows}"
vision.fps = 4.0
[optim]
lr = 1e-3
[train]
precision = "fp32"
max_steps = 2
[grpo]
prompts_per_step = 4
num_generations = 4
[rollout]
max_completion_length = 8
[reward.functions]
"rewards.py:vowels" = 1.0
[validation]
before_training = false
generate = false
"""
REWARDS = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cosmos3")
    (folder / "run.toml").write_text(CONFIG.format(rows=write_mixed_rows(folder / "data")))
    (folder / "rewards.py").write_text(REWARDS)
    done = dsreason("grpo", "--config", "run.toml", "--nproc", 2, "--output-dir", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.long
def test_vllm_samples_from_trained_policy(run: Path) -> None:
    steps = [line for line in metrics(run) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["mismatch/max_abs_logprob"] <= 1e-5 for line in steps)


@pytest.mark.long
def test_export_contains_only_reasoner_with_published_names(run: Path) -> None:
    exported = run / "export/final"
    names = load_file(exported / "model.safetensors").keys()
    family = FAMILIES["cosmos3_omni"]
    in_memory = dict(load_model(exported, dtype=torch.float32).named_parameters())
    assert names == {family.to_published_name(name) for name in in_memory}
    assert {"layers.0.self_attn.to_q.weight", "blocks.0.attn.qkv.weight"} <= names
    reference = dict(AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32).named_parameters())
    assert in_memory.keys() == reference.keys()
    assert all(in_memory[name].equal(reference[name]) for name in reference)
