"""Host memory for tensors of a GPU: pinned and in pieces, so that copies both ways run at the speed of the bus."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

PIECE = 2**26
"""Bytes of a piece. torch rounds pinned memory up to a power of two, so one large block could take twice its size."""
STAGE = 2**24
"""Bytes of each of the two buffers that a copy into ordinary memory goes through."""


class HostBuffer:
    """Host memory for the bytes of some tensors, one after the other."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        sizes = [min(PIECE, nbytes - start) for start in range(0, nbytes, PIECE)]
        self.pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        self.taken = False
        """True while the stored bytes are still needed; the users of a shared buffer set and check it."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def store(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of `tensors`, which fill the buffer."""
        for piece, part in self._iter_pairs(tensors):
            piece.copy_(part, non_blocking=True)
        wait_for_copies()

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values that were stored last into tensors of the same types and sizes, in the same order."""
        for piece, part in self._iter_pairs(tensors):
            part.copy_(piece, non_blocking=True)
        wait_for_copies()

    def _iter_pairs(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of equally long parts, `[bytes]`: of the buffer and of a tensor."""
        begin = 0
        for tensor in tensors:
            remaining = to_byte_view(tensor)
            while len(remaining):
                number, offset = divmod(begin, PIECE)
                piece = self.pieces[number][offset:][: len(remaining)]
                yield piece, remaining[: len(piece)]
                remaining, begin = remaining[len(piece) :], begin + len(piece)


class StagedCopy:
    """A copier of GPU tensors into ordinary memory through two pinned buffers: one is filled while the other is emptied.

    A direct copy into ordinary memory is several times slower.
    """

    @cached_property
    def buffers(self) -> list[Tensor]:
        return [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` into `target`, which has the same type and shape."""
        pending: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()

        def finish_oldest() -> None:
            event, buffer, part = pending.popleft()
            event.synchronize()
            part.copy_(buffer)

        parts = zip(to_byte_view(target).split(STAGE), to_byte_view(source.contiguous()).split(STAGE), strict=True)
        for number, (target_part, part) in enumerate(parts):
            if len(pending) == len(self.buffers):
                finish_oldest()
            buffer = self.buffers[number % len(self.buffers)][: len(part)]
            buffer.copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            pending.append((event, buffer, target_part))
        while pending:
            finish_oldest()


def to_byte_view(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, `[bytes]`."""
    return tensor.data.view(-1).view(torch.uint8)


def wait_for_copies() -> None:
    """Wait until all copies from and to the GPU are done, if the process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
