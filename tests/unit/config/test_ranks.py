from __future__ import annotations

import pytest
from pydantic import ValidationError

from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError


def make(global_batch_size: int) -> SFTConfig:
    return SFTConfig.model_validate({"train": {"global_batch_size": global_batch_size, "micro_batch_size": 8}})


@pytest.mark.parametrize(("batch", "ranks"), [(8, 8), (10, 4), (1, 1)])
def test_batch_covering_all_ranks_causes_no_warning(batch: int, ranks: int) -> None:
    assert make(batch).check_ranks(ranks) == []


def test_ranks_without_samples_cause_warning() -> None:
    assert make(2).check_ranks(4) == [
        (
            "train.global_batch_size is 2, but the number of ranks is 4, so 2 of them have no samples in a step; "
            "increase the batch size, or start fewer ranks"
        )
    ]


def shared_rows(size: int, global_batch_size: int = 8, **train: object) -> SFTConfig:
    settings = {"global_batch_size": global_batch_size, "sequence_parallel_size": size, **train}
    return SFTConfig.model_validate({"train": settings})


def test_each_sequence_parallel_group_needs_sample() -> None:
    assert shared_rows(2, 4).check_ranks(8) == []
    assert shared_rows(4, 1).check_ranks(8) == [
        (
            "train.global_batch_size is 1, but the number of groups of 4 ranks is 2, so 1 of them have no samples in a "
            "step; increase the batch size, or start fewer ranks"
        )
    ]


def test_sequence_parallel_size_must_divide_rank_count() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.sequence_parallel_size \(4\) does not divide the number of ranks \(6\)"
    ):
        shared_rows(4).check_ranks(6)


def test_sequence_parallel_requires_packing_and_dsreason_attention() -> None:
    with pytest.raises(ValidationError, match=r"sequence_parallel_size \(2\) requires packed rows.*packing = true"):
        shared_rows(2, packing=False)
    expected = r"requires dsreason's attention, but model\.attention is \"sdpa\"; set model\.attention = \"auto\""
    with pytest.raises(ValidationError, match=expected):
        SFTConfig.model_validate({"train": {"sequence_parallel_size": 2}, "model": {"attention": "sdpa"}})
