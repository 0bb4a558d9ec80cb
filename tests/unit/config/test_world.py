from __future__ import annotations

import pytest

from dsreason.config.schema import SFTConfig
from dsreason.config.world import check_world


def make(global_batch_size: int) -> SFTConfig:
    return SFTConfig.model_validate({"train": {"global_batch_size": global_batch_size, "micro_batch_size": 8}})


@pytest.mark.parametrize(("batch", "ranks"), [(8, 8), (10, 4), (1, 1)])
def test_any_batch_that_reaches_every_rank_is_fine(batch: int, ranks: int) -> None:
    assert check_world(make(batch), ranks) == []


def test_ranks_without_a_sample_are_pointed_out() -> None:
    assert check_world(make(2), 4) == [
        (
            "train.global_batch_size is 2, less than the number of ranks (4): 2 of them train on nothing in every step; "
            "raise it, or start fewer ranks"
        )
    ]
