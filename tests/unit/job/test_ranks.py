"""Rank functions that need no other rank. Collectives of real ranks: tests/integration."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dsreason.checkpoints.rng import load_rng_state, take_rng_state
from dsreason.errors import ConfigError
from dsreason.job import ranks
from dsreason.job.ranks import World, seed_everything


@pytest.fixture
def own_random_numbers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Restore the random-number state after each test, so that other tests are not affected."""
    file = tmp_path_factory.mktemp("rng") / "rng.safetensors"
    take_rng_state(torch.device("cpu"))(file)
    yield
    load_rng_state(file, torch.device("cpu"))


def drawn(seed: int, rank: int) -> tuple[float, float, float]:
    seed_everything(seed, rank)
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.usefixtures("own_random_numbers")
def test_random_numbers_depend_on_seed_and_rank() -> None:
    first, second = drawn(7, 0), drawn(7, 1)
    assert all(a != b for a, b in zip(first, second, strict=True))
    assert drawn(7, 0) == first


def test_rank_sums_keep_float64_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.dist, "all_reduce", lambda total, group: total.mul_(2))
    assert ranks.reduce_sum(2.0**24 + 1) == 2.0**25 + 2  # float32 would drop the 1


def test_first_rank_of_folder_is_identified() -> None:
    device = torch.device("cpu")
    shared = [World(rank, rank, 4, device) for rank in range(4)]
    assert [world.is_first_of_folder for world in shared] == [True, False, False, False]
    apart = [World(rank, rank % 2, 4, device, folder_ranks=(0, 1) if rank < 2 else (2, 3)) for rank in range(4)]
    assert [world.is_first_of_folder for world in apart] == [True, False, True, False]
    assert [list(world.ranks_here) for world in apart] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_consecutive_ranks_compute_rows_together() -> None:
    worlds = [World(rank, rank, 4, torch.device("cpu"), ranks_per_row=2) for rank in range(4)]
    assert [world.row_part for world in worlds] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert worlds[3].select_group_values(["a", "a", "b", "b"]) == ["a", "b"]


def test_ranks_not_divisible_into_groups_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "gather_objects", lambda value: [value])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(
        ConfigError, match=r"sequence_parallel_size \(2\) does not divide the number of ranks on .* \(3\)"
    ):
        ranks.build_row_groups(World(0, 0, 6, torch.device("cpu")), 2)
