"""Features of `build_engine` that DeepSpeed does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsreason.config.schema import OptimConfig
from dsreason.engine import engine as engine_module
from dsreason.engine.engine import (
    build_engine,
    build_parameter_groups,
    get_grad_norm,
    iter_full_parameters,
    plan_buckets,
    set_learning_rate,
)


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


def test_buffers_move_to_device_keeping_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_everything_where_it_is(**arguments: Any) -> tuple[SimpleNamespace]:  # as DeepSpeed does at stage 3
        return (SimpleNamespace(module=arguments["model"], device=torch.device("meta")),)

    monkeypatch.setattr(engine_module.deepspeed, "initialize", leave_everything_where_it_is)
    engine = build_engine(Model(), OptimConfig(), {})
    result = {name: (buffer.device.type, buffer.dtype) for name, buffer in engine.module.named_buffers()}
    assert result == {"rotary.inv_freq": ("meta", torch.float32), "steps": ("meta", torch.int64)}
    assert list(engine.module.state_dict()) == ["steps", "layer.weight", "layer.bias"]  # no non-persistent buffer


def test_matrices_decay_and_biases_do_not() -> None:
    model = Model()
    matrices, vectors = build_parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert (matrices["params"], matrices["weight_decay"]) == ([model.layer.weight], 0.1)
    assert (vectors["params"], vectors["weight_decay"]) == ([model.layer.bias], 0.0)


def test_learning_rate_applies_to_all_groups() -> None:
    groups = [{"lr": 1.0, "lr_multiplier": 1.0}, {"lr": 1.0, "lr_multiplier": 0.5}]
    engine: Any = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    set_learning_rate(engine, 0.25)
    assert [group["lr"] for group in groups] == [0.25, 0.125]


def test_refused_step_has_infinite_norm() -> None:
    engine: Any = SimpleNamespace(optimizer=SimpleNamespace(overflow=False), get_global_grad_norm=lambda: 2.5)
    assert get_grad_norm(engine) == 2.5
    engine.optimizer.overflow = True
    assert get_grad_norm(engine) == float("inf")


def test_buckets_group_consecutive_parameters_that_fit() -> None:
    # Bytes of float32: 8, 8, 40, 4, 4, 4.
    sizes = {"a": 2, "b": 2, "c": 10, "d": 1, "e": 1, "f": 1}
    parameters = [(name, [nn.Parameter(torch.zeros(size))]) for name, size in sizes.items()]
    buckets = [[name for name, _ in bucket] for bucket in plan_buckets(parameters, 16)]
    assert buckets == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert [[name for name, _ in bucket] for bucket in plan_buckets(parameters, 8)] == [
        *(["a"], ["b"], ["c"], ["d", "e"], ["f"])
    ]


def test_full_parameters_use_master_weights_if_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Module()
    model.model = nn.ParameterDict({name: torch.ones(1, dtype=torch.bfloat16) for name in ("a", "b", "c")})
    model.model["b"].requires_grad_(False)
    monkeypatch.setattr(engine_module, "safe_get_full_fp32_param", lambda parameter: torch.full((1,), 1.001))
    engine: Any = SimpleNamespace(module=model)
    result = [(name, tensor.dtype) for name, tensor in iter_full_parameters(engine)]
    assert result == [("a", torch.bfloat16), ("b", torch.bfloat16), ("c", torch.bfloat16)]
    result = [(name, tensor.dtype) for name, tensor in iter_full_parameters(engine, master=True, without={"c"})]
    assert result == [("a", torch.float32), ("b", torch.bfloat16)]
