"""vLLM's share of a GPU, compared with hand-computed values."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.tools.planning.phases import GIB
from dsreason.tools.planning.plan import plan_run
from dsreason.tools.planning.request import PlanRequest
from dsreason.tools.planning.sampling import VLLM
from tests.unit.tools.planning.made_requests import grpo

GPU = int(80 * 0.985 * GIB)


def engine(request: PlanRequest) -> VLLM:
    assert isinstance(request.config, GRPOConfig)
    return VLLM(request, request.config)


def test_token_bytes_cover_all_layers() -> None:
    assert engine(grpo()).token_bytes == 2 * 28 * 4 * 128 * 2


def test_delta_nets_keep_a_state_per_sequence(tiny_qwen3_5: Path) -> None:
    """Check the tiny model: one layer of two caches 2 heads of 32 channels; the other has 4 states of 128 x 128 numbers."""
    result = engine(grpo(str(tiny_qwen3_5), gpus=1))
    assert result.token_bytes == 2 * 1 * 2 * 32 * 2
    assert (result.max_sequences, result.states) == (128, 128 * 4 * 128 * 128 * 4)
    assert result.cache == result.share - result.weights - result.working - result.overhead - result.states


def test_memory_grows_in_proportion_to_row_length(tiny_qwen3_5: Path) -> None:
    """Check that rows too long for a trace of the delta rule's loop are extrapolated."""
    pieces = grpo(str(tiny_qwen3_5)).pieces
    short, long = (pieces.trace_text_layer(tokens) for tokens in (4096, 65536))
    assert pieces.layer_counts == (1, 1)
    assert long.kept == pytest.approx(16 * short.kept, rel=0.01) and long.peak == pytest.approx(
        16 * short.peak, rel=0.01
    )


def test_tensor_parallel_ranks_share_weights_and_heads() -> None:
    result = engine(grpo(rollout={"tensor_parallel_size": 2}))
    assert result.weights == 8_292_166_656
    assert result.token_bytes == 28 * 4 * 128 * 2


def test_cache_gets_remaining_share_in_blocks() -> None:
    result = engine(grpo(rollout={"gpu_memory_utilization": 0.5}))
    assert result.share == GPU // 2
    remaining = GPU // 2 - 2 * 8_292_166_656 - result.working - result.overhead
    assert result.cache_tokens == remaining // 57344 // 16 * 16


def test_sequences_follow_rollout_share_per_engine() -> None:
    assert engine(grpo(gpus=1, grpo={"prompts_per_step": 16, "num_generations": 8})).max_sequences == 128
    assert engine(grpo(gpus=8, grpo={"prompts_per_step": 16, "num_generations": 8})).max_sequences == 64
    assert engine(grpo(gpus=1, grpo={"prompts_per_step": 64, "num_generations": 8})).max_sequences == 256


def test_sleep_level_1_keeps_weights_on_host() -> None:
    dropped, remaining = engine(grpo()), engine(grpo(rollout={"sleep_level": 1}))
    assert remaining.host - dropped.host == 2 * 8_292_166_656


def test_training_state_stays_on_gpu_if_possible() -> None:
    """Check that both fit: training takes 8.29e9 x 18 / 8 bytes and a bucket (20 GiB), and vLLM 39 of the 78.8 GiB."""
    plan = plan_run(grpo(gpus=8))
    awake = next(phase for phase in plan.phases if phase.name == "rollout: vLLM awake")
    sizes = {item.name: item.nbytes for item in awake.items}
    assert plan.offloaded == 0
    assert sizes["optimizer state that stays"] == pytest.approx(12 * 8_292_166_656 / 8, rel=1e-3)
    assert "optimizer state during rollouts, pinned" not in {item.name for item in plan.host.items}
    assert '"auto" 0.0 GiB, "always" 11.6 GiB, "never" 0.0 GiB' in plan.notes[-1]


def test_state_is_offloaded_only_as_needed() -> None:
    auto = plan_run(grpo(gpus=4, rollout={"gpu_memory_utilization": 0.7}))
    always = plan_run(grpo(gpus=4, rollout={"gpu_memory_utilization": 0.7, "offload": "always"}))
    assert always.offloaded == pytest.approx(12 * 8_292_166_656 / 4, rel=1e-3)
    assert 0 < auto.offloaded < always.offloaded
    assert auto.fits and always.fits
    assert '"never" does not fit' in auto.notes[-1]


def test_disabled_offload_is_rejected_without_enough_memory() -> None:
    with pytest.raises(ConfigError, match=r'rollout\.offload = "never": vLLM 55\.16'):
        plan_run(grpo(gpus=4, rollout={"gpu_memory_utilization": 0.7, "offload": "never"}))
