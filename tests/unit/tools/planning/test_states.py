"""The placement of DeepSpeed's states, computed by hand."""

from __future__ import annotations

import pytest

from dsreason.tools.planning.states import compute_gathered, compute_states, round_pinned_size
from tests.unit.tools.planning.made_requests import sft

NUMEL = 8_292_166_656
"""Number of trained parameters of the 7B model; small parameters and padding are less than 1 in 10,000."""


def about(number: float) -> object:
    return pytest.approx(number, rel=1e-4)


def test_zero3_shards_18_bytes_per_parameter() -> None:
    states = compute_states(sft(gpus=4))
    assert states.weights == about(2 * NUMEL / 4)
    assert states.gradients == states.masters == about(4 * NUMEL / 4)
    assert states.moments == about(8 * NUMEL / 4)
    assert states.bucket == 4 * 100_000_000
    assert states.host == 0


def test_offload_keeps_bucket_and_small_parameters() -> None:
    states = compute_states(sft(gpus=2, ds_config="zero3_offload.json"))
    assert (states.weights, states.gradients, states.optimizer) == (0, 0, 0)
    assert 0 < states.persistent < 10_000_000
    assert states.host_weights == about(2 * NUMEL / 2)
    assert states.host_masters == about(4 * NUMEL / 2)
    assert states.host_moments == about(8 * NUMEL / 2)
    assert states.host_gradients == 2 * 2**34  # two pinned blocks, each rounded up from 16.6 GB


def test_frozen_weights_need_two_bytes() -> None:
    tower = NUMEL - 7_615_616_512
    full, frozen = compute_states(sft(gpus=1)), compute_states(sft(gpus=1, model={"freeze": ["visual"]}))
    assert frozen.weights == full.weights
    assert full.gradients - frozen.gradients == 4 * tower
    assert full.optimizer - frozen.optimizer == 12 * tower


def test_fp32_training_also_needs_master_weights() -> None:
    """DeepSpeed compares a device with a string, so it never reuses the fp32 weights as master weights."""
    states = compute_states(sft(gpus=1, train={"precision": "fp32"}))
    assert (states.weights, states.masters) == (4 * NUMEL, 4 * NUMEL)


def test_stage_2_replicates_all_weights() -> None:
    states = compute_states(sft(gpus=4, ds_config="zero2.json"))
    assert states.weights == 2 * NUMEL
    assert states.optimizer == about(12 * NUMEL / 4)


@pytest.mark.parametrize(("size", "pinned"), [(0, 0), (1, 1), (2**20, 2**20), (2**20 + 1, 2**21)])
def test_pinned_blocks_are_powers_of_two(size: int, pinned: int) -> None:
    assert round_pinned_size(size) == pinned


def test_single_rank_gathers_only_offloaded_weights() -> None:
    assert compute_gathered(sft(gpus=1)) == (0, 0)
    at_work, _ = compute_gathered(sft(gpus=1, ds_config="zero3_offload.json"))
    assert at_work == 2 * 152064 * 3584  # the output layer, which exceeds the 500 million values that stay gathered
