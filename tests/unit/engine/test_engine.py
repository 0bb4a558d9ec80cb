"""What `build_engine` does beyond DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsreason.config.schema import OptimConfig
from dsreason.engine import engine as engine_module
from dsreason.engine.engine import build_engine, parameter_groups


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.rotary = Rotary()
        self.register_buffer("steps", torch.ones(1, dtype=torch.int64))


def test_buffers_lie_on_the_engines_device_in_their_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_everything_where_it_is(**arguments: Any) -> tuple[SimpleNamespace]:  # as DeepSpeed does at stage 3
        return (SimpleNamespace(module=arguments["model"], device=torch.device("meta")),)

    monkeypatch.setattr(engine_module.deepspeed, "initialize", leave_everything_where_it_is)
    engine = build_engine(Model(), OptimConfig(), {})
    found = {name: (buffer.device.type, buffer.dtype) for name, buffer in engine.module.named_buffers()}
    assert found == {"rotary.inv_freq": ("meta", torch.float32), "steps": ("meta", torch.int64)}
    assert list(engine.module.state_dict()) == ["steps", "layer.weight", "layer.bias"]  # not persistent stays so


def test_matrices_decay_and_biases_do_not() -> None:
    model = Model()
    matrices, vectors = parameter_groups(model, weight_decay=0.1)
    assert (matrices["params"], matrices["weight_decay"]) == ([model.layer.weight], 0.1)
    assert (vectors["params"], vectors["weight_decay"]) == ([model.layer.bias], 0.0)
