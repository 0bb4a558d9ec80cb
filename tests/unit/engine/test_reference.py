"""A rank's reference policy with hand-made shares. Tests under real ZeRO: tests/integration/test_reference.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dsreason.engine.reference import ReferencePolicy, allocate_share_buffer
from dsreason.errors import CheckpointError


def engine_of(rank: int, **shares: list[float]) -> Any:
    """Build an engine with this rank's share of each parameter, as under ZeRO-3; `frozen` is not trained."""
    policy = nn.Module()
    policy.model = nn.Module()
    for name, values in shares.items():
        parameter: Any = nn.Parameter(torch.empty(0), requires_grad=name != "frozen")
        parameter.ds_id, parameter.ds_tensor = name, torch.tensor(values)
        policy.model.register_parameter(name, parameter)
    return SimpleNamespace(module=policy, global_rank=rank, optimizer=None)


def held(engine: Any) -> dict[str, list[float]]:
    return {name: parameter.ds_tensor.tolist() for name, parameter in engine.module.model.named_parameters()}


def test_reference_weights_are_swapped_in_and_restored() -> None:
    engine = engine_of(0, a=[1.0, 2.0], frozen=[3.0], b=[4.0])
    reference = ReferencePolicy(engine)
    for _, parameter in engine.module.named_parameters():
        parameter.ds_tensor.mul_(10)
    trained = {"a": [10.0, 20.0], "frozen": [30.0], "b": [40.0]}
    with reference.in_place():
        assert held(engine) == {"a": [1.0, 2.0], "frozen": [30.0], "b": [4.0]}
    assert held(engine) == trained
    with pytest.raises(ZeroDivisionError), reference.in_place():
        raise ZeroDivisionError
    assert held(engine) == trained
    reference.update_to_policy()
    with reference.in_place():
        assert held(engine) == trained


def test_references_share_the_policy_buffer_exclusively() -> None:
    engine = engine_of(0, a=[1.0, 2.0])
    room = allocate_share_buffer(engine)
    first = ReferencePolicy(engine, room)
    next(engine.module.parameters()).ds_tensor.mul_(10)
    second = ReferencePolicy(engine, room)
    next(engine.module.parameters()).ds_tensor.add_(1)
    for reference, inside in ((first, [1.0, 2.0]), (second, [10.0, 20.0])):
        with reference.in_place():
            assert held(engine) == {"a": inside}
        assert held(engine) == {"a": [11.0, 21.0]}
    with first.in_place(), pytest.raises(AssertionError, match="still holds another policy"), second.in_place():
        pass
    assert held(engine) == {"a": [11.0, 21.0]}


@pytest.mark.parametrize(("rank", "expected"), [(0, [1.0, 2.0, 3.0]), (1, [4.0, 5.0, 0.0])])
def test_each_rank_loads_its_shard(tmp_path: Path, rank: int, expected: list[float]) -> None:
    save_file({"a": torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), "frozen": torch.ones(1)}, tmp_path / "model.safetensors")
    engine = engine_of(rank, a=[0.0] * 3, frozen=[7.0])
    reference = ReferencePolicy(engine)
    reference.load(tmp_path)
    with reference.in_place():
        assert held(engine) == {"a": expected, "frozen": [7.0]}


def test_folder_missing_a_trained_tensor_is_rejected(tmp_path: Path) -> None:
    save_file({"b": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the tensor a, which the reference policy needs, is missing"):
        ReferencePolicy(engine_of(0, a=[0.0])).load(tmp_path)
