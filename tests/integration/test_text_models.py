"""Text-only models, trained with the installed command: both engines sample from them, and their exports can be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.integration.command import dsreason, metrics

pytestmark = pytest.mark.integration

CONFIG = """
[model]
path = "tiny:{family}"
[data]
adapter = "jsonl"
path = "rows.jsonl"
validation = 4
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
"""
REWARDS = "def vowels(completion, sample):\n    return sum(letter in 'aeiou' for letter in completion)\n"


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen2", marks=pytest.mark.nightly)])
def test_text_model_rollouts_match_trained_policy(tmp_path: Path, family: str) -> None:
    rows = [{"id": str(i), "question": f"How many are {i} and one?", "answer": str(i + 1)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(CONFIG.format(family=family))
    (tmp_path / "rewards.py").write_text(REWARDS)
    done = dsreason("grpo", "--config", "run.toml", "--nproc", 2, "--output-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["train/grad_norm"] > 0 and line["mismatch/max_abs_logprob"] <= 1e-5 for line in steps)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export" / "final")
    assert exported.config.model_type == family
