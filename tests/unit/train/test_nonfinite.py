"""Steps with non-finite numbers: messages, counts and saved files.

The tests of complete runs are in tests/integration/test_nonfinite.py.
"""

from __future__ import annotations

import json
import logging
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.config.schema import SFTConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.collate import collate, pack
from dsreason.data.rank_parts import take_part
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import DsReasonError, SaveError
from dsreason.job.part_of import PartOf
from dsreason.job.ranks import World
from dsreason.rollout.protocol import make_single_turn
from dsreason.train.common import nonfinite
from dsreason.train.common.nonfinite import MAX_SKIPPED, FiniteCheck, build_finite_check, get_tensors
from dsreason.train.grpo.loop import describe_batches
from dsreason.train.grpo.rollouts import Rollout, RolloutMicroBatch, build_training_sample

WORLD = World(0, 0, 1, torch.device("cpu"))
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "share_errors", nullcontext)


def numbers(loss: float, norm: float) -> dict[str, float]:
    return {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": 1e-5}


@pytest.mark.parametrize(
    ("loss", "norm", "skipped", "said"),
    [
        (NAN, NAN, 1, "step 3: loss nan, gradient norm nan at learning rate 1e-05: the step was skipped"),
        (1.0, INF, 1, "step 3: loss 1.0, gradient norm inf at learning rate 1e-05: the step was skipped"),
        (
            INF,
            2.0,
            0,
            "step 3: loss inf, gradient norm 2.0 at learning rate 1e-05: the gradient is finite and was applied",
        ),
    ],
)
def test_step_outcome_is_reported_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: float, norm: float, skipped: int, said: str
) -> None:
    check = FiniteCheck("skip", tmp_path, WORLD)
    with caplog.at_level(logging.WARNING):
        metrics = check.metrics(numbers(loss, norm), [], 3)
    assert said in caplog.text
    assert metrics["train/skipped_steps"] == skipped
    assert all(map(math.isfinite, metrics.values()))


def test_resumed_run_continues_skip_count(tmp_path: Path) -> None:
    config = SFTConfig.model_validate({"train": {"on_nonfinite": "skip"}})
    first = build_finite_check(config, tmp_path, WORLD, TrainerState())
    for _ in range(MAX_SKIPPED - 1):
        first.metrics(numbers(NAN, NAN), [], 3)
    saved = json.loads(json.dumps(first.counts))
    resumed = build_finite_check(config, tmp_path, WORLD, TrainerState(extra=saved))
    assert resumed.skipped == MAX_SKIPPED - 1
    with pytest.raises(DsReasonError, match=f"as in the previous {MAX_SKIPPED - 1} steps"):
        resumed.metrics(numbers(NAN, NAN), [], 3)


def test_isolated_skipped_steps_do_not_end_run(tmp_path: Path) -> None:
    check = FiniteCheck("skip", tmp_path, WORLD)
    for _ in range(MAX_SKIPPED):
        check.metrics(numbers(NAN, NAN), [], 3)
        check.metrics(numbers(1.0, 2.0), [], 4)
    assert check.skipped == MAX_SKIPPED


def test_unsavable_samples_are_reported_with_step(tmp_path: Path) -> None:
    (tmp_path / "nonfinite").write_text("in the way")
    check = FiniteCheck("stop", tmp_path / "nonfinite", WORLD)
    with pytest.raises(SaveError, match=r"^step 3: loss nan, .*; rank 0 cannot save its samples in .*/step_3: "):
        check.metrics(numbers(NAN, NAN), [], 3)


def made_rollout(name: str, completion: str) -> Rollout:
    encoded = EncodedSample(
        id=name,
        input_ids=torch.tensor([1, 2]),
        loss_mask=torch.zeros(2, dtype=torch.bool),
        position_ids=torch.arange(2).expand(3, -1),
        mm_token_type_ids=torch.zeros(2, dtype=torch.int64),
        mm_kwargs={},
    )
    sample = Sample(name, [{"role": "user", "content": f"question {name}"}], answer="yes")
    prompt = EncodedPrompt(sample, encoded, [1, 2], [])
    return Rollout(prompt, make_single_turn((7,), completion, (-1.0,), "stop", 0), 1.0, {"right": 1.0}, 0.5)


def test_nonfinite_grpo_step_names_its_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = [made_rollout("a", "left"), made_rollout("b", "right")]
    batches = [collate([build_training_sample(rollout)], pad_id=0) for rollout in rollouts]
    batches[1] = replace(batches[1], media_numbers={"video": (0, 1, 0)})
    micro_batches = [RolloutMicroBatch(batch, [item]) for batch, item in zip(batches, rollouts, strict=True)]
    tokenizer = SimpleNamespace(decode=lambda ids: f"the prompt {ids}")
    finite = FiniteCheck("stop", tmp_path / "nonfinite", WORLD)
    metrics = {"train/loss": NAN, "train/grad_norm": INF, "train/learning_rate": 1e-5}
    with pytest.raises(DsReasonError, match="step 5: loss nan, gradient norm inf"):
        finite.metrics(metrics, batches, 5, lambda: describe_batches(micro_batches, tokenizer))
    saved = json.loads((tmp_path / "nonfinite/step_5/rank_0.json").read_text())
    displayed = [
        [(item["id"], item["prompt"], item["completion"], item["advantage"]) for item in batch] for batch in saved
    ]
    assert displayed == [[("a", "the prompt [1, 2]", "left", 0.5)], [("b", "the prompt [1, 2]", "right", 0.5)]]
    assert load_file(tmp_path / "nonfinite/step_5/rank_0.safetensors")["1.video_numbers"].tolist() == [0, 1, 0]


def test_ranks_sharing_a_row_save_pixels_together() -> None:
    encoded = replace(
        made_rollout("a", "left").prompt.encoded,
        mm_token_type_ids=torch.tensor([2, 2]),
        mm_kwargs={"pixel_values_videos": torch.arange(8.0)[:, None], "video_grid_thw": torch.tensor([[2, 2, 2]])},
    )
    row = pack([encoded])
    saved = [get_tensors(take_part(row, PartOf(rank, 2), pad_id=0)) for rank in (0, 1)]
    assert [item["part"].tolist() for item in saved] == [[0, 1], [1, 2]]
    assert [item["part_grids"].tolist() for item in saved] == [[[1, 2, 2]], [[1, 2, 2]]]
    assert torch.cat([item["pixel_values"] for item in saved]).flatten().tolist() == list(range(8))
