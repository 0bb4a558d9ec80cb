"""Differences between engine and trainer: their metrics, and the limits that stop a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from dsreason.config.schema_grpo import RolloutConfig
from dsreason.data.chat import EncodedPrompt
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import MismatchError
from dsreason.rollout.protocol import make_single_turn
from dsreason.train.grpo.mismatch import (
    Mismatch,
    check,
    compute_mismatch_metrics,
    find_worst,
    measure_mismatches,
)
from dsreason.train.grpo.rollouts import Rollout

NOTHING = torch.zeros(1)
ENCODED = EncodedSample("p", NOTHING, NOTHING, NOTHING, NOTHING, {})


def rollout(name: str, part: dict[str, str], logprobs: tuple[float, ...]) -> Rollout:
    sample = Sample(name, [{"role": "user", "content": [part]}])
    completion = make_single_turn(tuple(range(len(logprobs))), name, logprobs, "stop", 0)
    return Rollout(EncodedPrompt(sample, ENCODED, [], []), completion, 0.0, {}, 0.0)


ROLLOUTS = [
    rollout("7", {"type": "video", "video": "a.mp4"}, (-1.0, -2.0)),
    rollout("8", {"type": "text", "text": "?"}, (-3.0,)),
]


def test_mismatch_metrics_match_formula() -> None:
    # d = trainer - engine: 0.5, 0 | -0.1; k3 = e^d - d - 1: 0.148721, 0 | 0.004837
    result = measure_mismatches(ROLLOUTS, torch.tensor([-0.5, -2.0, -3.1]))
    assert [(item.id, item.modality, item.at) for item in result] == [("7", "video", 0), ("8", "text", 0)]
    assert compute_mismatch_metrics(result) == pytest.approx(
        {
            "mismatch/kl": 0.153558 / 3,
            "mismatch/max_abs_logprob": 0.5,
            "mismatch/kl/video": 0.148721 / 2,
            "mismatch/max_abs_logprob/video": 0.5,
            "mismatch/kl/text": 0.004837,
            "mismatch/max_abs_logprob/text": 0.1,
        },
        abs=1e-5,
    )
    assert [item.id for item in find_worst(result)] == ["7", "8"]


def test_mean_mismatch_stops_run_regardless_of_outliers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RolloutConfig(mismatch_warn=0.02, mismatch_stop=0.5)
    ones = [Mismatch("7", "video", "left", 100, 1.0, 9.0, 3)]
    check({"mismatch/kl": 0.01, "mismatch/max_abs_logprob": 9.0}, ones, config, 4, tmp_path)
    assert not list(tmp_path.iterdir())
    with caplog.at_level(logging.WARNING):
        check({"mismatch/kl": 0.1}, ones, config, 4, tmp_path)
    assert "mismatch/kl between engine and trainer is 0.1" in caplog.text and "'7' (video" in caplog.text
    (line,) = (tmp_path / "step_4.jsonl").read_text().splitlines()
    assert json.loads(line)["largest"] == 9.0


@pytest.mark.parametrize("kl", [0.6, float("nan"), float("inf")])
def test_policy_mismatch_stops_the_run(tmp_path: Path, kl: float) -> None:
    ones = [Mismatch("7", "video", "left", 1, kl, 1.0, 0)]
    with pytest.raises(MismatchError, match=r"step 5: .*'7' \(video.*step_5\.jsonl.*rollout\.mismatch_stop \(0\.5\)"):
        check({"mismatch/kl": kl}, ones, RolloutConfig(mismatch_stop=0.5), 5, tmp_path)


def test_nan_mismatch_ranks_worst() -> None:
    ones = [Mismatch(str(kl), "text", "", 1, kl, 1.0, 0) for kl in (0.5, float("nan"), 2.0)]
    assert [item.id for item in find_worst(ones)] == ["nan", "2.0", "0.5"]
