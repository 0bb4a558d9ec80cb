"""Copies of a checkpoint in host memory: their content, and the memory they need. Complete checkpoints: tests/integration."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsreason.checkpoints import checkpoint_writer
from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter, SnapshotEngine, iter_tensors
from dsreason.engine.average import WeightAverage
from dsreason.job.ranks import World
from dsreason.monitor.memory import GIB


def copied(content: Any, buffers: dict[tuple[str, int], torch.Tensor]) -> Any:
    snapshot = SnapshotEngine(copying=True)
    snapshot.buffers = buffers
    return snapshot.on_host("file", content)


def test_copy_keeps_structure_and_is_independent() -> None:
    tensor = torch.arange(3.0)
    content = OrderedDict(group=[{"weights": tensor, "step": 4}, (tensor[1:], "text")])
    result = copied(content, {})
    tensor.zero_()
    assert type(result) is OrderedDict
    assert result["group"][0]["weights"].tolist() == [0, 1, 2]
    assert result["group"][1][0].tolist() == [1, 2]
    assert (result["group"][0]["step"], result["group"][1][1]) == (4, "text")


def test_shared_tensor_is_copied_once() -> None:
    tensor = torch.arange(3.0)
    result = copied({"a": tensor, "b": [tensor]}, buffers := {})
    assert result["a"] is result["b"][0]
    assert len(buffers) == 1
    assert len(list(iter_tensors({"a": tensor, "b": (tensor, 5, [tensor])}))) == 3


def test_copy_buffers_are_reused_when_they_fit() -> None:
    buffers: dict[tuple[str, int], torch.Tensor] = {}
    first = copied([torch.zeros(3), torch.zeros(2)], buffers)
    second = copied([torch.ones(3), torch.ones(4)], buffers)
    assert second[0] is first[0]
    assert [tensor.tolist() for tensor in second] == [[1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("others", "beside", "expected"),
    [
        ([], 0, True),  # 1 GiB is needed, and 3 are free
        ([("here", GIB, 3 * GIB)], 0, True),
        ([("here", 2 * GIB, 3 * GIB)], 0, False),  # 1.1 x 3 GiB would not fit
        ([("here", GIB, 2 * GIB)], 0, False),  # the lowest count applies
        ([("there", 9 * GIB, GIB)], 0, True),  # another host's memory does not count
        ([], GIB, True),
        ([], 2 * GIB, False),  # an average of the weights is also copied
    ],
)
def test_copy_requires_memory_for_all_host_ranks(
    monkeypatch: pytest.MonkeyPatch, others: list[tuple[str, int, int]], beside: int, expected: bool
) -> None:
    monkeypatch.setattr(checkpoint_writer.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(checkpoint_writer, "count_available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(checkpoint_writer, "gather_objects", lambda own: [own, *others])
    monkeypatch.setattr(SnapshotEngine, "size", GIB)
    snapshot = SnapshotEngine(copying=True)
    snapshot.save({"a": torch.ones(1)}, "file")
    snapshot.copy(beside)
    assert snapshot.copied is expected
    assert [path for path, _ in snapshot.files] == [Path("file")]


@pytest.mark.parametrize("background", [True, False])
def test_averages_are_copied_only_for_background_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Avoid needless copies, because the average of a 14B model takes 56 GB over all ranks."""
    value: list[dict[str, dict[str, torch.Tensor]]] = []
    monkeypatch.setattr(checkpoint_writer, "gather_objects", lambda own: [own])
    monkeypatch.setattr(checkpoint_writer, "make_partial_folder", lambda *_: tmp_path)
    monkeypatch.setattr(checkpoint_writer, "run_once_per_folder", lambda world, call: call())
    monkeypatch.setattr(checkpoint_writer, "build_state_writer", lambda *rest: value.append(rest[-1]) or (lambda: None))
    average: Any = object.__new__(WeightAverage)
    average.shares = {"weight": torch.ones(3)}
    engine: Any = SimpleNamespace(
        checkpoint_engine=None, _copy_recovery_script=None, save_checkpoint=lambda *_, **__: None
    )
    world = World(0, 0, 1, torch.device("cpu"))
    writer = CheckpointWriter(engine, tmp_path, world, background=background, averages={"ema": average})
    writer.start(1, TrainerState(1, 0.0, 0))
    writer.close()
    result = value[0]["ema"]["weight"]
    assert result.tolist() == [1, 1, 1]
    assert (result is not average.shares["weight"]) is background
