"""Qwen3.5, trained with the installed command: vLLM samples from it, and transformers loads its export.

vLLM's CPU kernel for linear attention requires bfloat16, so the log-probabilities of engine and policy differ by rounding, up to
0.012 for this model; `tests/unit/families/test_qwen3_5.py` compares the policy with transformers in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from dsreason.models.load import load_model
from tests.integration.command import dsreason, metrics
from tests.integration.rows import write_mixed_rows
from tests.integration.test_cosmos3 import CONFIG, REWARDS

pytestmark = pytest.mark.integration


@pytest.mark.long
def test_vllm_samples_from_policy_and_export_loads(tmp_path: Path) -> None:
    config = CONFIG.replace('"fp32"', '"bf16"').format(family="qwen3_5", rows=write_mixed_rows(tmp_path / "data"))
    (tmp_path / "run.toml").write_text(config)
    (tmp_path / "rewards.py").write_text(REWARDS)
    done = dsreason("grpo", "--config", "run.toml", "--nproc", 2, "--output-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(0 < line["mismatch/max_abs_logprob"] <= 0.03 for line in steps)
    assert all(line["mismatch/kl"] <= 5e-5 for line in steps)
    assert {kind for kind in ("text", "image", "video") if f"mismatch/kl/{kind}" in steps[0] | steps[1]} == {
        "text",
        "image",
        "video",
    }
    exported = tmp_path / "run/export/final"
    in_memory = dict(load_model(exported, dtype=torch.bfloat16).named_parameters())
    reference, info = AutoModelForImageTextToText.from_pretrained(
        exported, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    parameters = dict(reference.named_parameters())
    assert in_memory.keys() == parameters.keys()
    assert all(in_memory[name].equal(parameters[name]) for name in in_memory)
