"""Batches of prompts, which are the same for every number of ranks; skipped rows are reported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import SampleTooLong
from dsreason.data.prompts import PromptLoader, Prompts
from dsreason.data.sources import open_datasets
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError
from dsreason.job.part_of import PartOf
from dsreason.train.common.preflight import build_encoder, check_dataset
from dsreason.train.grpo.preflight import build_prompt_encoder, build_rollout_order
from tests.integration.rows import write_mixed_rows
from tests.unit.data.test_loader import gathering

WORLD = 2


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_mixed_rows(tmp_path)


def config(rows: Path, model_path: Path, **sections: Any) -> GRPOConfig:
    data = {"adapter": "jsonl", "path": str(rows), "workers": 0, "shuffle": False, "vision": {"fps": 4.0}}
    return GRPOConfig.model_validate(
        {
            "model": {"path": str(model_path), **sections.get("model", {})},
            "data": data | sections.get("data", {}),
            "train": sections.get("train", {}),
            "grpo": {"prompts_per_step": 4},
            "rollout": {"max_completion_length": sections.get("max_completion_length", 8)},
            "reward": {"functions": {"exact_match": 1.0}},
        }
    )


def batches(settings: GRPOConfig, count: int, *, world_size: int = WORLD, **options: Any) -> list[list[Prompts]]:
    """Return the first `count` batches of each rank."""
    training, _ = open_datasets(settings.data)
    encoder = build_prompt_encoder(settings, build_encoder(settings, Path(settings.model.path)))
    order = build_rollout_order(training, settings)

    def one_rank(rank: int, exchange: Any) -> list[Prompts]:
        place = {"exchange": exchange, "rank": rank, "world_size": world_size}
        return list(islice(PromptLoader(training, encoder, order, settings, **place, **options), count))

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(one_rank, range(world_size), gathering(world_size)))


def ids(prompts: Prompts) -> list[str]:
    return [prompt.sample.id for prompt in prompts.prompts]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_continue_after_the_last_epoch(rows, tiny_qwen3_vl, workers):
    settings = config(rows, tiny_qwen3_vl, train={"epochs": 1}, data={"workers": workers})
    [result] = batches(settings, 4, world_size=1, start=1)
    assert [prompts.batch for prompts in result] == [1, 2, 3, 4]
    assert [ids(prompts) for prompts in result] == [list("4567"), list("0123"), list("4567"), list("0123")]


def test_ranks_share_a_batch_with_global_indices(rows, tiny_qwen3_vl):
    for prompts in zip(*batches(config(rows, tiny_qwen3_vl), 2), strict=True):
        assert [item.numbers for item in prompts] == [[0, 2], [1, 3]]
    [[zero], [item]] = batches(config(rows, tiny_qwen3_vl), 1)
    assert (ids(zero), ids(item)) == (["0", "2"], ["1", "3"])


def test_rank_without_prompts_gets_empty_batch(rows, tiny_qwen3_vl):
    [*_, [last]] = batches(config(rows, tiny_qwen3_vl), 1, world_size=5)
    assert (last.prompts, last.numbers) == ([], [])


def spoil(rows: Path) -> None:
    """Delete the image of the fourth row."""
    next(rows.parent.glob("3_*.png")).write_bytes(b"no image")


def test_bad_row_error_reaches_every_rank(rows, tiny_qwen3_vl):
    spoil(rows)
    with pytest.raises(DataError, match=r"rows\.jsonl, row 4: .*3_\d\.png"):
        batches(config(rows, tiny_qwen3_vl), 1)


def test_bad_row_is_skipped_and_reported_everywhere(rows, tiny_qwen3_vl):
    spoil(rows)
    [[zero, later], [item, _]] = batches(config(rows, tiny_qwen3_vl, data={"on_bad_row": "skip"}), 2)
    assert (ids(zero), zero.numbers) == (["0", "2"], [0, 2])
    assert (ids(item), item.numbers) == (["1"], [1])
    assert zero.skipped == item.skipped
    [text] = zero.skipped
    assert text.count("row 4") == 1
    assert later.skipped == []


def test_bad_row_in_worker_is_skipped(rows, tiny_qwen3_vl):
    spoil(rows)
    settings = config(rows, tiny_qwen3_vl, data={"on_bad_row": "skip", "workers": 1})
    [[prompts]] = batches(settings, 1, world_size=1)  # ranks are threads here, so only a single one may fork
    assert (ids(prompts), prompts.numbers) == (["0", "1", "2"], [0, 1, 2])
    assert [text.count("row 4") for text in prompts.skipped] == [1]


def test_row_rejected_by_check_counts_as_bad(rows, tiny_qwen3_vl):
    def check(sample: Sample) -> None:
        if sample.id == "0":
            raise DataError("not this one")

    with pytest.raises(DataError, match=r"rows\.jsonl, row 1: not this one"):
        batches(config(rows, tiny_qwen3_vl), 1, check=check)
    [[zero], _] = batches(config(rows, tiny_qwen3_vl, data={"on_bad_row": "skip"}), 1, check=check)
    assert (ids(zero), zero.numbers, len(zero.skipped)) == (
        ["2"],
        [2],
        1,
    )  # the number is the position in the whole batch


@pytest.mark.parametrize("on_too_long", ["error", "skip"])
def test_prompt_leaves_room_for_longest_completion(rows, tiny_qwen3_vl, on_too_long):
    limits = {"max_length": 60, "on_too_long": on_too_long}
    settings = config(rows, tiny_qwen3_vl, model=limits, max_completion_length=40)
    if on_too_long == "error":
        with pytest.raises(DataError, match=r"sample '\d' has \d+ tokens.* is 20 \(.*max_completion_length\)"):
            batches(settings, 1)
    else:
        [[zero], [item]] = batches(settings, 1)
        assert 0 < len(zero.skipped) == 4 - len(zero.prompts) - len(item.prompts)


def test_config_without_prompt_room_is_rejected(rows, tiny_qwen3_vl):
    settings = config(rows, tiny_qwen3_vl, model={"max_length": 40}, max_completion_length=40)
    with pytest.raises(ConfigError, match=r"max_completion_length \(40\).*model.max_length \(40\)"):
        batches(settings, 1)


def test_prompt_length_respects_micro_batch_token_budget(rows, tiny_qwen3_vl):
    settings = config(rows, tiny_qwen3_vl, train={"max_tokens_per_micro_batch": 50}, max_completion_length=40)
    with pytest.raises(
        SampleTooLong, match=r"is 10 \(train.max_tokens_per_micro_batch minus rollout.max_completion_length\)"
    ):
        prompt = open_datasets(settings.data)[0][0]
        build_prompt_encoder(settings, build_encoder(settings, tiny_qwen3_vl)).encode_prompt(prompt)


def test_prompt_length_excludes_reference_answer(rows, tiny):
    settings = config(rows, tiny)
    training, _ = open_datasets(settings.data)
    encoder = build_prompt_encoder(settings, build_encoder(settings, tiny))
    for sample in (training[i] for i in range(len(training))):
        assert encoder.measure(sample) == len(encoder.encode_prompt(sample).encoded)


def test_rows_failing_check_are_found_at_startup(rows, tiny_qwen3_vl):
    def check(sample: Sample) -> None:
        if sample.id in ("2", "5"):
            raise DataError(f"not {sample.id}")

    settings = config(rows, tiny_qwen3_vl)
    training, _ = open_datasets(settings.data)
    encoder = build_encoder(settings, tiny_qwen3_vl)
    with pytest.raises(
        DataError, match=r"training: 2 rows cannot .*\n  2 times: not …\n  .*row 3: not 2\n  .*row 6: not 5$"
    ):
        check_dataset("training", training, encoder, settings, check)
    lenient = config(rows, tiny_qwen3_vl, data={"on_bad_row": "skip"})
    left_out = check_dataset("training", training, encoder, lenient, check)
    assert [text.split(", ")[1] for text in left_out] == ["row 3: not 2", "row 6: not 5"]


def test_ranks_sharing_rows_get_identical_prompts(rows: Path, tiny_qwen3_vl: Path) -> None:
    result = batches(config(rows, tiny_qwen3_vl), 2, world_size=4, ranks_per_row=2)
    alone = batches(config(rows, tiny_qwen3_vl), 2, world_size=2)
    for rank, (item, expected) in enumerate(zip(result, [alone[0], alone[0], alone[1], alone[1]], strict=True)):
        assert [(part.numbers, ids(part)) for part in item] == [(part.numbers, ids(part)) for part in expected]
        requested = [part.part(PartOf(rank % 2, 2)) for part in item]
        assert [part.numbers for part in requested] == [part.numbers[rank % 2 :: 2] for part in expected]
