"""Code that preserves tensors in vLLM's memory pools, other than weights and KV cache, whose values vLLM loses during sleep.

Examples are the zeros that Qwen3-VL adds to prompts without media, the positions of a CUDA graph's unused rows and, in
older versions, the block tables. vLLM has no list of such tensors, so this module finds them by their memory addresses.
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
"""Tags of the pools whose contents are lost in sleep. vLLM preserves other pools itself, or uses them only as scratch space."""
Pools = Callable[[int], str | None]
"""Function that maps a device address to the tag of the vLLM pool that contains the address; None if no pool does."""


def find_pools() -> Pools:
    """Return a function that looks up addresses in the current pools. Without sleep mode, as on a CPU, vLLM has no pools."""
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
    """Byte views of the tensors to preserve, by pool tag, and copies of their contents from before the last sleep."""

    memory: dict[str, list[Tensor]] = field(default_factory=dict)
    contents: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """Pool tag → copies in host memory; None stands for a tensor of zeros."""

    @property
    def size_gib(self) -> float:
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

    One call after vLLM has started is enough, because no tensors are created in the pools later.
    """
    model: nn.Module = runner.model
    restored = [*model.parameters(), *model.buffers(), *runner.kv_caches]
    restored_storages = {tensor.untyped_storage().data_ptr() for tensor in restored}
    memory: dict[str, list[Tensor]] = {}
    for tensor in iter_all_tensors():
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # torch's compiler leaves wrapper tensors behind, which have no memory
            continue
        if address in restored_storages or not storage.nbytes() or (tag := pools(address)) not in DROPPED:
            continue
        restored_storages.add(address)
        # A new byte tensor wraps the storage, because vLLM's inference tensors are read-only outside inference mode.
        memory.setdefault(tag, []).append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    return SleepState(memory)


def iter_all_tensors() -> Iterator[Tensor]:
    """Yield all tensors of the process, including those that vLLM has hidden from the garbage collector with `gc.freeze`."""
    if frozen := gc.get_freeze_count():
        gc.unfreeze()
    objects = gc.get_objects()
    if frozen:
        gc.freeze()
    for owner in objects:
        if type(owner) in (Tensor, nn.Parameter) and owner.device.type != "meta" and owner.layout == torch.strided:
            yield owner
