"""vLLM's share of a GPU, by hand."""

from __future__ import annotations

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.planning.phases import GIB
from dsreason.planning.request import Request
from dsreason.planning.sampling import VLLM
from tests.unit.planning.made_requests import grpo

GPU = int(80 * 0.985 * GIB)


def engine(request: Request) -> VLLM:
    assert isinstance(request.config, GRPOConfig)
    return VLLM(request, request.config)


def test_a_token_has_keys_and_values_of_every_layer() -> None:
    assert engine(grpo()).token_bytes == 2 * 28 * 4 * 128 * 2


def test_tensor_parallel_ranks_share_weights_and_heads() -> None:
    found = engine(grpo(rollout={"tensor_parallel_size": 2}))
    assert found.weights == 8_292_166_656
    assert found.token_bytes == 28 * 4 * 128 * 2


def test_the_cache_gets_what_is_left_of_the_share_in_whole_blocks() -> None:
    found = engine(grpo(rollout={"gpu_memory_utilization": 0.5}))
    assert found.share == GPU // 2
    left = GPU // 2 - 2 * 8_292_166_656 - found.working - found.overhead
    assert found.cache_tokens == left // 57344 // 16 * 16


def test_it_draws_what_a_rollout_asks_of_one_engine() -> None:
    assert engine(grpo(gpus=1, grpo={"prompts_per_step": 16, "num_generations": 8})).sequences == 128
    assert engine(grpo(gpus=8, grpo={"prompts_per_step": 16, "num_generations": 8})).sequences == 64
    assert engine(grpo(gpus=1, grpo={"prompts_per_step": 64, "num_generations": 8})).sequences == 256


def test_sleep_level_1_keeps_its_weights_on_the_host() -> None:
    dropped, kept = engine(grpo()), engine(grpo(rollout={"sleep_level": 1}))
    assert kept.host - dropped.host == 2 * 8_292_166_656
