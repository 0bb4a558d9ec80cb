from __future__ import annotations

import pytest

from dsreason.config.schema import SFTConfig


def make(global_batch_size: int) -> SFTConfig:
    return SFTConfig.model_validate({"train": {"global_batch_size": global_batch_size, "micro_batch_size": 8}})


@pytest.mark.parametrize(("batch", "ranks"), [(8, 8), (10, 4), (1, 1)])
def test_any_batch_that_reaches_every_rank_is_fine(batch: int, ranks: int) -> None:
    assert make(batch).check_ranks(ranks) == []


def test_ranks_without_a_sample_are_pointed_out() -> None:
    assert make(2).check_ranks(4) == [
        (
            "train.global_batch_size is 2, less than the number of ranks (4): 2 of them train on nothing in every step; "
            "raise it, or start fewer ranks"
        )
    ]
