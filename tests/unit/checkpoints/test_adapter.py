"""The facts that an export records about the adapters merged into it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file

from dsreason.checkpoints.adapter import Merge, write_adapter
from dsreason.checkpoints.checkpoint_folder import SavedAdapter, TrainerState
from dsreason.errors import CheckpointError
from dsreason.models.lora import Delta
from dsreason.train.common.run_folder import check_base

ADAPTER = SavedAdapter(
    "org/base", None, "abc", {"r": 1, "lora_alpha": 2, "peft_type": "LORA"}, {"x.q": 2.0, "x.k": 2.0}
)
WEIGHT = torch.full((2, 2), 2.0)  # norm 4


def merge(size: float, dtype: str) -> tuple[Merge, dict[str, torch.Tensor]]:
    """Merge adapters into two of three weights; the second weight changes by `size`."""
    record = Merge(dtype, ADAPTER)
    a = torch.tensor([[1.0, 0.0]])
    deltas = [Delta(a, torch.tensor([[b], [0.0]]), 2.0) for b in (size, 2 * size)]
    weights = [("x.q.weight", WEIGHT, deltas[0]), ("x.k.weight", WEIGHT, deltas[1]), ("x.norm.weight", WEIGHT, None)]
    return record, dict(record.merge_weights(weights))


def test_merged_weights_and_adapter_use_peft_names(tmp_path: Path) -> None:
    record, tensors = merge(0.25, "bf16")
    assert tensors["x.q.weight"].tolist() == [[2.5, 2.0], [2.0, 2.0]]
    assert tensors["x.k.weight"].tolist() == [[3.0, 2.0], [2.0, 2.0]]
    assert tensors["x.norm.weight"] is WEIGHT
    write_adapter(record, tmp_path)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(written) == [f"base_model.model.x.{name}.lora_{part}.weight" for name in "kq" for part in "AB"]
    assert written["base_model.model.x.k.lora_B.weight"].tolist() == [[0.5], [0.0]]
    assert written["base_model.model.x.k.lora_B.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == ADAPTER.settings


def test_summary_reports_merge_and_largest_change() -> None:
    record, _ = merge(0.25, "bf16")
    assert record.changes == pytest.approx({"x.q.weight": 0.125, "x.k.weight": 0.25})
    assert record.summary == (
        "LoRA of rank 1, alpha 2, on 2 layers, merged into these weights; also saved separately in `adapter/`. Largest "
        "relative change of a weight: 0.25 (x.k.weight)"
    )
    assert Merge("bf16", None).summary == ""


def test_quantized_adapter_card_names_its_base(tmp_path: Path) -> None:
    record, _ = merge(0.25, "bf16")
    (tmp_path / "plain").mkdir()
    write_adapter(record, tmp_path / "plain")
    assert not (tmp_path / "plain" / "adapter" / "README.md").exists()
    record.adapter = replace(ADAPTER, quantize="nf4")
    (tmp_path / "quantized").mkdir()
    write_adapter(record, tmp_path / "quantized")
    card = (tmp_path / "quantized" / "adapter" / "README.md").read_text()
    assert "trained on org/base, with the matrices of the language model quantised to 4 bits" in card
    assert (
        "on 2 layers, merged into the base model's weights, quantised to NF4 and dequantised as in training"
        in record.summary
    )


@pytest.mark.parametrize(("then", "now"), [("nf4", None), (None, "nf4")])
def test_base_with_different_quantization_is_rejected(then: Any, now: Any) -> None:
    saved = Mock(state=TrainerState(adapter=replace(ADAPTER, quantize=then)))
    with patch("dsreason.train.common.run_folder.read_checkpoint", return_value=saved):
        check_base(Path("step_3"), replace(ADAPTER, quantize=then))
        with pytest.raises(CheckpointError, match="restore the old value") as raised:
            check_base(Path("step_3"), replace(ADAPTER, quantize=now))
    before, after = (f'"{item}"' if item else "unset" for item in (then, now))
    assert f"with model.quantize {before}, but it is now {after}," in str(raised.value)


@pytest.mark.parametrize(
    ("size", "dtype", "warned"), [(4e-3, "bf16", True), (6e-3, "bf16", False), (4e-3, "fp32", False)]
)
def test_change_lost_in_bfloat16_is_warned_about(
    size: float, dtype: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    record, _ = merge(size, dtype)  # the largest change is 2 · 2 · size / 4
    with caplog.at_level(logging.WARNING):
        record.report(Path("out"))
    assert ("rounding to bfloat16 loses part" in caplog.text) is warned
