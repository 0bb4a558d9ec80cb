"""Recomputation with layer inputs in host memory, which must not change gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsreason.data.collate import pack
from dsreason.models import policy
from dsreason.models.freeze import freeze
from dsreason.models.load import load_model
from dsreason.models.policy import enable_gradient_checkpointing, run_decoder
from dsreason.models.processors.loading import open_encoder


def gradients(path: Path, frozen: list[str], *, offload: bool) -> dict[str, Tensor]:
    """Compute the gradients for the tokens of an image."""
    encoder = open_encoder(path, dtype=torch.float32, max_length=99, max_length_key="model.max_length")
    model = load_model(path, dtype=torch.float32)
    freeze(model, frozen)
    enable_gradient_checkpointing(model, offload=offload)
    hidden = run_decoder(model, pack([encoder.build_dummy("image")]), use_cache=False).last_hidden_state
    hidden.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("frozen", "moved"),
    [
        ([], 4),  # the inputs of two vision blocks and two language-model layers
        (["visual"], 2),
        (["visual", "embed_tokens"], 1),  # no module before the first layer is trained
    ],
)
def test_offloaded_inputs_give_the_same_gradients(
    frozen: list[str], moved: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(tiny, frozen, offload=False)
    calls = []

    def counted(pin_memory: bool) -> Any:
        calls.append(pin_memory)
        return torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)

    monkeypatch.setattr(policy, "save_on_cpu", counted)
    result = gradients(tiny, frozen, offload=True)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert len(calls) == moved
