"""The state of the trainer's process while vLLM runs in it, and afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, Cosmos3EdgeConfig

from dsreason.job.ranks import World
from dsreason.rollout import vllm_engine
from dsreason.rollout.sleep_state import SleepState
from dsreason.rollout.vllm_engine import VLLMEngine
from dsreason.rollout.vllm_process import map_pools, preserve_process_state

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def test_vllm_uses_original_linear_despite_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    linear = torch._C._nn.linear
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)  # as `deepspeed.zero.Init` does
    with preserve_process_state(WORLD):
        assert torch.nn.functional.linear is linear
        with preserve_process_state(WORLD):
            assert torch.nn.functional.linear is linear
        assert torch.nn.functional.linear is linear
    assert torch.nn.functional.linear is zero3_linear_wrap
    with pytest.raises(RuntimeError, match="out of memory"), preserve_process_state(WORLD):
        raise RuntimeError("out of memory")
    assert torch.nn.functional.linear is zero3_linear_wrap


def test_vllm_config_classes_are_removed_afterwards() -> None:
    """vLLM replaces transformers' class of Cosmos3-Edge, from which transformers could not build the model."""
    with preserve_process_state(WORLD):
        AutoConfig.register("cosmos3_edge", type("VLLMConfig", (Cosmos3EdgeConfig,), {}), exist_ok=True)
        assert CONFIG_MAPPING["cosmos3_edge"] is not Cosmos3EdgeConfig
    assert CONFIG_MAPPING["cosmos3_edge"] is Cosmos3EdgeConfig


@pytest.mark.parametrize(("free", "woken"), [(30, ["kv_cache", "weights"]), (29, None)])
def test_sleeping_pools_are_remapped_when_memory_allows(free: int, woken: Any) -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    asleep = {"weights": (True, 10), "kv_cache": (True, 20), "runtime": (False, 50)}
    data = {
        i: SimpleNamespace(tag=tag, is_asleep=is_asleep, handle=(0, size, i, 0))
        for i, (tag, (is_asleep, size)) in enumerate(asleep.items())
    }
    calls = mock.Mock()
    allocator = SimpleNamespace(pointer_to_data=data, wake_up=calls.wake_up)
    with (
        mock.patch.object(CuMemAllocator, "instance", allocator),
        mock.patch("torch.cuda.empty_cache", calls.empty_cache),
        mock.patch("torch.cuda.mem_get_info", lambda: (free, 80)),
    ):
        map_pools()
    expected = [mock.call.empty_cache()] + ([mock.call.wake_up(tags=woken)] if woken else [])
    assert calls.mock_calls == expected


@pytest.mark.parametrize("failing", ["wake_up", "empty_cache"])
def test_unmappable_pools_are_freed_without_error(failing: str) -> None:
    """Check that no second error hides the GPU error that ended the engine."""
    from vllm.device_allocator.cumem import CuMemAllocator

    data = {0: SimpleNamespace(tag="weights", is_asleep=True, handle=(0, 1, 0, 0))}
    calls = mock.Mock()
    getattr(calls, failing).side_effect = RuntimeError("CUDA Error")
    with (
        mock.patch.object(CuMemAllocator, "instance", SimpleNamespace(pointer_to_data=data, wake_up=calls.wake_up)),
        mock.patch("torch.cuda.empty_cache", calls.empty_cache),
        mock.patch("torch.cuda.mem_get_info", lambda: (2, 80)),
    ):
        map_pools()
    assert getattr(calls, failing).called


def test_engine_drops_references_before_freeing_pools() -> None:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.llm, engine.model, engine.version, engine.world = object(), object(), 3, WORLD
    engine.slots, engine.sent, engine.buffers = [object()], {"w": torch.ones(1)}, {"b": torch.ones(1)}
    engine.state = SleepState({"weights": [torch.ones(1)]})
    recorded: list[object] = []

    def release(llm: object) -> None:
        recorded.extend([llm, engine.llm, engine.model, engine.slots, engine.state.memory])

    with mock.patch.object(vllm_engine, "release", release):
        engine.shutdown()
        engine.shutdown()
    assert recorded[0] is not None and recorded[1:] == [None, None, [], {}]
