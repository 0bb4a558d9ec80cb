"""Tensors of a memory pool other than weights, buffers, keys and values: they are found wherever they are stored, and
written back after sleep.

Others means besides weights, buffers, keys and values.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dsreason.rollout.sleep_state import SleepState, find_pools, find_sleep_state

KEPT_BY_A_MODULE: list[Tensor] = []


def runner(*caches: Tensor) -> SimpleNamespace:
    """Build a runner like vLLM's: a model with a parameter and a buffer, and the caches of its layers."""
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(4.0))
    return SimpleNamespace(model=model, kv_caches=list(caches))


def pools_of(**tensors: Tensor) -> Callable[[int], str | None]:
    """Return a stand-in for vLLM's lookup of the pool to which a memory address belongs."""
    tags = {tensor.untyped_storage().data_ptr(): name.partition("__")[0] for name, tensor in tensors.items()}
    return tags.get


def test_tensors_in_pools_are_found_everywhere() -> None:
    cache, rows = torch.zeros(2, 3), torch.inference_mode()(torch.ones)(6)
    outside, frozen, loose, scratch = torch.ones(3), torch.arange(3), torch.arange(5), torch.ones(7)
    made = runner(cache)
    made.nested = {"rows": [rows[1:3]]}  # a view counts as its memory
    made.function = lambda: frozen
    KEPT_BY_A_MODULE.append(loose)
    local = {
        "weights__w": made.model.weight,
        "weights__b": made.model.table,
        "kv_cache__k": cache,
        "workspace__s": scratch,
    }
    gc.freeze()
    try:
        state = find_sleep_state(made, pools_of(weights__r=rows, weights__f=frozen, kv_cache__l=loose, **local))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    result = {tag: {memory.data_ptr() for memory in part} for tag, part in state.memory.items()}
    assert result == {"weights": {rows.data_ptr(), frozen.data_ptr()}, "kv_cache": {loose.data_ptr()}}
    assert not {outside.data_ptr(), scratch.data_ptr()} & (result["weights"] | result["kv_cache"])
    KEPT_BY_A_MODULE.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_dropped_values_are_restored_per_pool(dtype: torch.dtype) -> None:
    values, zeros, cached = (torch.tensor(v).to(dtype) for v in ([0, 1, 1], [0, 0, 0], [1, 0, 1]))
    tensors = {"weights__v": values, "weights__z": zeros, "kv_cache__c": cached}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    state = find_sleep_state(runner(), pools_of(**tensors))
    for _ in range(2):
        state.remember()
        for part in state.memory.values():
            for memory in part:
                memory.fill_(255)
        state.write_back("weights")
        assert torch.equal(values, before["weights__v"]) and torch.equal(zeros, before["weights__z"])
        assert not torch.equal(cached, before["kv_cache__c"])
        state.write_back("kv_cache")
        assert torch.equal(cached, before["kv_cache__c"])


def test_nothing_is_saved_without_pools() -> None:
    state = find_sleep_state(runner(), find_pools())  # a CPU has none
    state.remember()
    state.write_back("weights")
    assert state == SleepState()


def test_addresses_map_to_pools_of_vllm_allocator() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    def allocation(start: int, size: int, tag: str) -> SimpleNamespace:
        return SimpleNamespace(handle=(0, size, start, 0), tag=tag)

    data = {item.handle[2]: item for item in (allocation(1000, 100, "kv_cache"), allocation(200, 50, "weights"))}
    with mock.patch.object(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=data)):
        pools = find_pools()
    addresses = (199, 200, 249, 250, 999, 1000, 1099, 1100)
    assert [pools(address) for address in addresses] == [
        None, "weights", "weights", None, None, "kv_cache", "kv_cache", None,
    ]  # fmt: skip
