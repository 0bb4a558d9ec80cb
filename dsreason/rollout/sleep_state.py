"""What vLLM's memory pools hold beside weights, keys and values: sleep drops it, and nothing but this writes it again.

Examples are the zeros that Qwen3-VL adds to prompts without media, the positions of a CUDA graph's unused rows, and in
older versions the tables of blocks. No list names them: what counts is where a tensor lies.
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
"""Tags of the pools that get memory back when they are woken by name. Others vLLM keeps itself, or holds to be scratch."""
Pools = Callable[[int], str | None]
"""Device address → tag of the vLLM pool that it lies in; None outside of them."""


def vllm_pools() -> Pools:
    """The pools as they are now. Without sleep mode, as on a CPU, there are none."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    allocations = {} if allocator is None else allocator.pointer_to_data
    starts = sorted(allocations)

    def tag_of(address: int) -> str | None:
        place = bisect_right(starts, address) - 1
        if place < 0:
            return None
        data = allocations[starts[place]]
        return data.tag if address < starts[place] + data.handle[1] else None

    return tag_of


@dataclass
class SleepState:
    """The memory behind such tensors, as bytes by pool, and its contents when the engine fell asleep."""

    memory: dict[str, list[Tensor]] = field(default_factory=dict)
    contents: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """On the CPU; None: zeros."""

    @property
    def gib(self) -> float:
        return sum(tensor.nbytes for part in self.memory.values() for tensor in part) / 2**30

    def remember(self) -> None:
        self.contents = {
            tag: [tensor.to("cpu", copy=True) if tensor.any() else None for tensor in memory]
            for tag, memory in self.memory.items()
        }

    def write_back(self, tag: str) -> None:
        """Once the pool `tag` has its memory again."""
        for memory, content in zip(self.memory.get(tag, []), self.contents.pop(tag, []), strict=True):
            if content is None:
                memory.zero_()
            else:
                memory.copy_(content)


def find_sleep_state(runner: Any, pools: Pools) -> SleepState:
    """Every tensor of the process that lies in such a pool, but for what vLLM's model `runner` has as weights, buffers, keys
    and values. To be called once after vLLM's start: nothing is made in these pools later.
    """
    model: nn.Module = runner.model
    restored = [*model.parameters(), *model.buffers(), *runner.kv_caches]
    restored_storages = {tensor.untyped_storage().data_ptr() for tensor in restored}
    memory: dict[str, list[Tensor]] = {}
    for tensor in all_tensors():
        storage = tensor.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:  # a wrapper that torch's compiler has left: no memory of its own
            continue
        if address in restored_storages or not storage.nbytes() or (tag := pools(address)) not in DROPPED:
            continue
        restored_storages.add(address)
        # Bytes of its own: vLLM's tensors are made in inference mode, and nothing else may write to such.
        memory.setdefault(tag, []).append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    return SleepState(memory)


def all_tensors() -> Iterator[Tensor]:
    """Also those that vLLM has frozen, which the garbage collector does not list."""
    if frozen := gc.get_freeze_count():
        gc.unfreeze()
    objects = gc.get_objects()
    if frozen:
        gc.freeze()
    for owner in objects:
        if type(owner) in (Tensor, nn.Parameter) and owner.device.type != "meta" and owner.layout == torch.strided:
            yield owner
