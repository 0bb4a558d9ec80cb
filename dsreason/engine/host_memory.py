"""Host memory that tensors of a GPU are copied to, and from, as fast as the bus can: pinned, in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

PIECE = 2**26
"""Bytes. torch rounds pinned memory up to a power of two: one block for everything could take twice its size."""
STAGE = 2**24
"""Bytes of one of the two buffers that a copy into ordinary memory goes through."""


class HostBuffer:
    """Host memory for the bytes of some tensors, one behind the other."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        sizes = [min(PIECE, nbytes - start) for start in range(0, nbytes, PIECE)]
        self.pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        self.taken = False
        """Whether somebody still needs what was stored; for those who share it."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def store(self, tensors: Iterable[Tensor]) -> None:
        """Take the values of `tensors`, which fill it."""
        for piece, part in self._pairs(tensors):
            piece.copy_(part, non_blocking=True)
        synchronize()

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors of the same types and sizes, in the same order, the values that were stored last."""
        for piece, part in self._pairs(tensors):
            part.copy_(piece, non_blocking=True)
        synchronize()

    def _pairs(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Equally long parts, `[bytes]`: here, and of a tensor."""
        begin = 0
        for tensor in tensors:
            remaining = as_bytes(tensor)
            while len(remaining):
                number, offset = divmod(begin, PIECE)
                piece = self.pieces[number][offset:][: len(remaining)]
                yield piece, remaining[: len(piece)]
                remaining, begin = remaining[len(piece) :], begin + len(piece)


class StagedCopy:
    """Copies tensors of a GPU into ordinary memory through two pinned buffers: one is filled while the other is emptied.

    Straight into ordinary memory a GPU copies several times more slowly.
    """

    @cached_property
    def buffers(self) -> list[Tensor]:
        return [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Both have the same type and shape."""
        on_the_way: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()

        def land() -> None:
            arrived, buffer, part = on_the_way.popleft()
            arrived.synchronize()
            part.copy_(buffer)

        parts = zip(as_bytes(target).split(STAGE), as_bytes(source.contiguous()).split(STAGE), strict=True)
        for number, (to, part) in enumerate(parts):
            if len(on_the_way) == len(self.buffers):
                land()
            buffer = self.buffers[number % len(self.buffers)][: len(part)]
            buffer.copy_(part, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            on_the_way.append((arrived, buffer, to))
        while on_the_way:
            land()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, `[bytes]`."""
    return tensor.data.view(-1).view(torch.uint8)


def synchronize() -> None:
    """Wait until copies from and to the GPU are done, where one is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
