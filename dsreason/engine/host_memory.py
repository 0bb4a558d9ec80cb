"""Host buffers for GPU tensors. A buffer consists of several pieces, and is pinned so that copies run at bus speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

PIECE = 2**26
"""Size of a buffer's pieces in bytes. torch rounds pinned allocations up to a power of two, which could waste half of a large
block."""
STAGE = 2**24
"""Size in bytes of each of the two pinned buffers in `StagedCopy`."""


class HostBuffer:
    """Host buffer of `nbytes` bytes that stores several tensors one after another."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        sizes = [min(PIECE, nbytes - start) for start in range(0, nbytes, PIECE)]
        self.pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        self.taken = False
        """Whether the stored bytes are still needed; the users of a shared buffer set and check this flag."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def store(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of `tensors` into the buffer; their sizes must add up to `nbytes`."""
        for piece, part in self._iter_pairs(tensors):
            piece.copy_(part, non_blocking=True)
        wait_for_copies()

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Copy the stored values to `tensors`, which must have the same types, sizes and order as in the last `store`."""
        for piece, part in self._iter_pairs(tensors):
            part.copy_(piece, non_blocking=True)
        wait_for_copies()

    def _iter_pairs(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of byte views `[bytes]` with equal lengths: a part of the buffer and the corresponding part of a tensor."""
        begin = 0
        for tensor in tensors:
            remaining = to_byte_view(tensor)
            while len(remaining):
                number, offset = divmod(begin, PIECE)
                piece = self.pieces[number][offset:][: len(remaining)]
                yield piece, remaining[: len(piece)]
                remaining, begin = remaining[len(piece) :], begin + len(piece)


class StagedCopy:
    """Copier of GPU tensors to pageable host memory. It fills one of two pinned buffers while it empties the other.

    A direct copy to pageable memory would be several times slower.
    """

    @cached_property
    def buffers(self) -> list[Tensor]:
        return [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy the GPU tensor `source` to the host tensor `target`, which must have the same type and shape."""
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
    """Return a byte view `[bytes]` of a contiguous tensor."""
    return tensor.data.view(-1).view(torch.uint8)


def wait_for_copies() -> None:
    """Wait until all copies to and from the GPU are complete; do nothing if the process does not use a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
