"""Preservation of tensors in vLLM's memory pools that are neither weights nor KV cache; vLLM's sleep loses their values.

Examples are the zeros that Qwen3-VL adds to prompts without media, the positions of a CUDA graph's unused rows and, in
older versions, the block tables. vLLM has no list of such tensors, so they are found by memory address.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

DROPPED = ("weights", "kv_cache")
"""Tags of the pools that get new memory when they are woken by tag. vLLM preserves other pools, or uses them as scratch space."""
Pools = Callable[[int], str | None]
"""Function that maps a device address to the tag of the vLLM pool that contains it; None if no pool does."""


def find_pools() -> Pools:
    """Return a lookup function for the current pools. Without sleep mode, for example on a CPU, vLLM has no pools."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    allocations = {} if allocator is None else allocator.pointer_to_data
    starts = sorted(allocations)

    def find_tag(address: int) -> str | None:
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        data = allocations[starts[index]]
        return data.tag if address < starts[index] + data.handle[1] else None

    return find_tag


@dataclass
class SleepState:
    """Memory of the tensors to preserve, as byte tensors by pool tag, and its contents before the engine's last sleep."""

    memory: dict[str, list[Tensor]] = field(default_factory=dict)
    contents: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """Copies on the CPU, by pool tag; None represents a tensor of zeros."""

    @property
    def gib(self) -> float:
        return sum(tensor.nbytes for part in self.memory.values() for tensor in part) / 2**30

    def remember(self) -> None:
        self.contents = {
            tag: [tensor.to("cpu", copy=True) if tensor.any() else None for tensor in memory]
            for tag, memory in self.memory.items()
        }

    def write_back(self, tag: str) -> None:
        """Restore the contents of the pool `tag`, which must already have new memory."""
        for memory, content in zip(self.memory.get(tag, []), self.contents.pop(tag, []), strict=True):
            if content is None:
                memory.zero_()
            else:
                memory.copy_(content)


def find_sleep_state(runner: Any, pools: Pools) -> SleepState:
    """Find all tensors in the pools, except the weights, buffers and KV cache of vLLM's model `runner`.

    Call this once after vLLM has started: no tensors are created in the pools later.
    """
    model: nn.Module = runner.model
    restored = [*model.parameters(), *model.buffers(), *runner.kv_caches]
    restored_storages = {tensor.untyped_storage().data_ptr() for tensor in restored}
    memory: dict[str, list[Tensor]] = {}
    for tensor in iter_all_tensors():
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # wrapper tensors left by torch's compiler have no memory
            continue
        if address in restored_storages or not storage.nbytes() or (tag := pools(address)) not in DROPPED:
            continue
        restored_storages.add(address)
        # Wrap the storage in a new byte tensor: vLLM's tensors are inference tensors, which are read-only outside inference mode.
        memory.setdefault(tag, []).append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    return SleepState(memory)


def iter_all_tensors() -> Iterator[Tensor]:
    """Yield all tensors of the process, including those that vLLM has hidden from the garbage collector by `gc.freeze`."""
    if frozen := gc.get_freeze_count():
        gc.unfreeze()
    objects = gc.get_objects()
    if frozen:
        gc.freeze()
    for owner in objects:
        if type(owner) in (Tensor, nn.Parameter) and owner.device.type != "meta" and owner.layout == torch.strided:
            yield owner
