"""The choice of tensors that leave the GPU for vLLM, tested with numbers that are easy to add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsreason.config.schema_grpo import OffloadMode
from dsreason.engine.rollout_memory import GIB, OffloadAmount, RolloutMemory, choose_amount, count_moving
from dsreason.errors import ConfigError

TWO_BILLION = RolloutMemory(
    total=80 * GIB,
    vllm=36 * GIB,
    fixed=4 * GIB,
    gradients=8 * GIB,
    moments=16 * GIB,
    masters=8 * GIB,
    sync=GIB,
    outside=int(1.2 * GIB),
)
"""Training takes 36 GiB, so the margin is 1.2 + 1 + 0.05 x 36 = 4 GiB, and the total is 36 + 36 + 4 = 76 GiB."""


def test_needed_memory_is_share_training_and_margin() -> None:
    assert TWO_BILLION.needed == pytest.approx(76 * GIB, abs=2)
    assert TWO_BILLION.describe() == "vLLM 36.00 + training 36.00 + margin 4.00 = 76.00 GiB of the GPU's 80.00 GiB"


@pytest.mark.parametrize(
    ("total", "drop_gradients", "moved"),
    [
        (80, False, 0),
        (76.1, False, 0),
        (70, True, 0),  # 6 GiB are missing, and gradients take 8
        (60, True, 8),  # 16 are missing
        (44.5, True, 23.5),
        (40, True, 24),  # 36 are missing, but only 24 can be moved
    ],
)
def test_offload_auto_moves_only_as_much_as_needed(total: float, drop_gradients: bool, moved: float) -> None:
    amount = choose_amount("auto", replace(TWO_BILLION, total=int(total * GIB)))
    assert amount.drop_gradients is drop_gradients
    assert amount.move_bytes == pytest.approx(moved * GIB, abs=2)


@pytest.mark.parametrize("total", [40, 60, 80])
def test_offload_always_moves_all_state(total: int) -> None:
    assert choose_amount("always", replace(TWO_BILLION, total=total * GIB)) == OffloadAmount(True, 24 * GIB)


@pytest.mark.parametrize(("total", "drop_gradients"), [(80, False), (70, True)])
def test_offload_never_moves_no_state(total: int, drop_gradients: bool) -> None:
    assert choose_amount("never", replace(TWO_BILLION, total=total * GIB)) == OffloadAmount(drop_gradients, 0)


def test_never_offload_is_rejected_without_room() -> None:
    """Check the advice: 8 of 60 GiB are missing even without gradients, so vLLM may use 36 - 8 = 28 of 60 GiB, or 0.466."""
    with pytest.raises(ConfigError) as raised:
        choose_amount("never", replace(TWO_BILLION, total=60 * GIB))
    message = str(raised.value)
    assert "= 76.00 GiB of the GPU's 60.00 GiB" in message
    assert "8.00 GiB are missing" in message
    assert 'set rollout.offload = "auto", or lower rollout.gpu_memory_utilization to 0.46' in message


def test_never_mode_omits_utilization_advice_if_none_fits() -> None:
    with pytest.raises(ConfigError, match=r'set rollout\.offload = "auto"$'):
        choose_amount("never", replace(TWO_BILLION, total=30 * GIB))


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_host_state_is_not_moved_again(mode: OffloadMode) -> None:
    """Move nothing with `offload_optimizer`: neither gradients nor optimizer are on the GPU."""
    memory = replace(TWO_BILLION, gradients=0, moments=0, masters=0)
    assert choose_amount(mode, memory).move_bytes == 0


@pytest.mark.parametrize(("num_bytes", "count"), [(0, 0), (1, 1), (10, 1), (11, 2), (30, 2), (31, 3), (35, 3), (36, 3)])
def test_whole_tensors_move_until_enough_is_free(num_bytes: int, count: int) -> None:
    assert count_moving([10, 20, 5], num_bytes) == count
