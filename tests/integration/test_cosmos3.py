"""The reasoners of Cosmos3 and Cosmos3-Edge, trained with the installed command: sampling with vLLM, and the export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dsreason.families import FAMILIES
from dsreason.models.load import load_model
from dsreason.models.tiny import build_tiny
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows

pytestmark = pytest.mark.integration

CONFIG = """
[model]
path = "tiny:{family}"
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


@pytest.fixture(scope="module", params=["cosmos3_omni", "cosmos3_edge"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a folder that is named after the model's family."""
    folder = tmp_path_factory.mktemp("cosmos3")
    (folder / "run.toml").write_text(CONFIG.format(family=request.param, rows=write_mixed_rows(folder / "data")))
    (folder / "rewards.py").write_text(REWARDS)
    done = dsreason("grpo", "--config", "run.toml", "--nproc", 2, "--output-dir", request.param, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / request.param


@pytest.mark.long
def test_vllm_samples_from_trained_policy(run: Path) -> None:
    steps = [line for line in metrics(run) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["mismatch/max_abs_logprob"] <= 1e-5 for line in steps)


@pytest.mark.long
def test_export_contains_only_reasoner_with_published_names(run: Path) -> None:
    exported = run / "export/final"
    names = load_file(exported / "model.safetensors").keys()
    family = FAMILIES[run.name]
    in_memory = dict(load_model(exported, dtype=torch.float32).named_parameters())
    assert names == {family.to_published_name(name) for name in in_memory}
    tower = {"cosmos3_omni": "blocks.0.attn.qkv.weight", "cosmos3_edge": "model.visual.encoder.layers.0.mlp.fc1.weight"}
    assert {"layers.0.self_attn.to_q.weight", tower[run.name]} <= names
    reference = dict(AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32).named_parameters())
    assert in_memory.keys() == reference.keys()
    assert all(in_memory[name].equal(reference[name]) for name in reference)


@pytest.mark.long
def test_export_keeps_the_config_that_vllm_reads(run: Path) -> None:
    """The config of Cosmos3-Edge has a section that transformers neither reads nor writes by itself."""
    exported = json.loads((run / "export/final/config.json").read_text())
    model = json.loads((build_tiny(run.name, run.parent / "model") / "config.json").read_text())
    assert exported == model
    assert ("projector_config" in exported) == (run.name == "cosmos3_edge")
