"""Copies between a GPU and the host. Tensors that claim to be on a GPU, and fake events, stand in for a real GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsreason.checkpoints.checkpoint_writer import SnapshotEngine
from dsreason.engine import host_memory
from dsreason.engine.host_memory import HostBuffer, StagedCopy


def tensors() -> list[Tensor]:
    """Return 43 bytes of tensors in four dtypes; one tensor holds a single number, and one is empty."""
    numbers = torch.arange(1, 6, dtype=torch.float32).reshape(5, 1)
    return [
        numbers,
        numbers[:4].bfloat16(),
        torch.tensor(7),
        torch.empty(0),
        torch.tensor([True, False, True]),
        numbers[:2],
    ]


def test_values_are_restored_from_arbitrary_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE", 16)
    stored, existing = tensors(), [torch.zeros_like(tensor) for tensor in tensors()]
    buffer = HostBuffer(sum(tensor.nbytes for tensor in stored), pinned=False)
    assert [piece.nbytes for piece in buffer.pieces] == [16, 16, 15]
    assert buffer.nbytes == 20 + 8 + 8 + 0 + 3 + 8
    buffer.store(iter(stored))
    buffer.restore(existing)
    assert all(map(torch.equal, existing, tensors()))


def test_pinned_memory_rounding_stays_below_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would pin 2**30 bytes for 2**29 + 1; here, all blocks except the last have a power of two of bytes."""
    blocks: list[int] = []
    monkeypatch.setattr(host_memory.torch, "empty", lambda size, **options: blocks.append(size))
    HostBuffer(2**29 + 1, pinned=True)
    assert blocks == [2**26] * 8 + [1]


class Copies(Tensor):
    """A pinned buffer. Copies from a GPU arrive either at once, or only when somebody waits for them."""

    late = False
    under_way: list[Callable[[], object]]

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        used, buffer = source.as_subclass(Tensor), self.as_subclass(Tensor)
        if Copies.late:
            Copies.under_way.append(lambda: buffer.copy_(used))
        else:
            buffer.copy_(used)
        return self


class Event:
    def record(self) -> None:
        self.before = list(Copies.under_way)

    def synchronize(self) -> None:
        for copy in self.before:
            if copy in Copies.under_way:
                copy()
                Copies.under_way.remove(copy)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "source", [*tensors(), torch.arange(24.0).reshape(4, 6).t()], ids=lambda t: f"{t.nbytes} bytes"
)
def test_staged_copy_is_complete_despite_late_parts(
    source: Tensor, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "STAGE", 7)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Copies, "late", late)
    monkeypatch.setattr(Copies, "under_way", [], raising=False)
    staged, target = StagedCopy(), torch.zeros(source.shape, dtype=source.dtype)
    staged.buffers = [torch.zeros(7, dtype=torch.uint8).as_subclass(Copies) for _ in range(2)]
    staged.copy(target, source)
    assert torch.equal(target, source)
    assert not Copies.under_way


class OnGPU(Tensor):
    is_cuda = True


def test_only_gpu_snapshots_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Tensor] = []
    snapshot = SnapshotEngine(copying=True)
    monkeypatch.setattr(snapshot.staged, "copy", lambda target, source: recorded.append(source) or target.copy_(source))
    here, existing = torch.arange(3.0), torch.arange(4.0).as_subclass(OnGPU)
    copied = snapshot.on_host("file", {"here": here, "there": [existing], "again": here})
    assert torch.equal(copied["here"], here)
    assert torch.equal(copied["there"][0], existing.as_subclass(Tensor))
    assert [type(tensor) for tensor in recorded] == [OnGPU]
    assert copied["again"] is copied["here"] is not here
    assert not any(buffer.is_cuda for buffer in snapshot.buffers.values())
