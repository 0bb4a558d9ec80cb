"""Reward functions for clips: their inputs, their valid results, and the reports of their failures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsreason.errors import ConfigError, DataError, RewardError
from dsreason.world.rewards.functions import BUILT_IN, check_scores
from dsreason.world.rewards.scorer import ClipScores, open_scorer
from dsreason.world.schema import WorldRewardConfig
from dsreason.world.types import WorldRow

ROWS = [WorldRow("train.txt:1", "a red ship", meta={"tag": "x"}), WorldRow("train.txt:2", "a blue ship")]
CLIPS = torch.tensor([51, 255], dtype=torch.uint8).view(2, 1, 1, 1, 1).expand(2, 3, 5, 16, 16)
LATENTS = torch.zeros(2, 16, 2, 2, 2)

OWN = """
import os, time
import numpy as np

def level(clips, samples):
    assert str(clips.dtype) == "torch.float32" and list(clips.shape) == [2, 3, 5, 16, 16]
    return clips.mean(dim=(1, 2, 3, 4))

def facts(clips, samples):
    return [len(s.prompt) + s.meta["fps"] + len(s.meta.get("tag", "")) for s in samples]

def whole_batch(clips, samples):
    return np.full(len(samples), float(clips.std()))

async def waiting(clips, samples):
    return (1, 2)

def process(clips, samples):
    return [os.getpid()] * 2

def too_few(clips, samples):
    return [1.0]

def not_finite(clips, samples):
    return [1.0, float("nan")]

def huge(clips, samples):
    return [1.0, -1e300]

def text(clips, samples):
    return "good"

def texts(clips, samples):
    return ["1.0", "2.0"]

def broken(clips, samples):
    raise ValueError("no weights")

def dies(clips, samples):
    os._exit(3)

def hangs(clips, samples):
    time.sleep(60)

def one(clips):
    return [0, 0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return str(file)


def score(config: WorldRewardConfig) -> ClipScores:
    with open_scorer(config) as scorer:
        return scorer.start(CLIPS, LATENTS, ROWS, fps=16.0).result()


def config(*names: str, workers: int = 0, **settings: float) -> WorldRewardConfig:
    return WorldRewardConfig(functions=dict.fromkeys(names, 1.0), workers=workers, **settings)


def test_total_is_weighted_but_parts_are_not(file: str) -> None:
    scores = score(WorldRewardConfig(functions={"brightness": 2.0, f"{file}:level": -0.5}, workers=0))
    assert {name: values.tolist() for name, values in scores.by_name.items()} == {
        "brightness": pytest.approx([0.2, 1.0]),
        "level": pytest.approx([0.2, 1.0]),
    }
    assert scores.total.dtype == torch.float32
    assert scores.total.tolist() == pytest.approx([0.3, 1.5])


def test_options_reach_a_built_in_function() -> None:
    red = CLIPS * torch.tensor([1, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1, 1)
    settings = WorldRewardConfig(functions={"solid": 1.0}, options={"solid": {"share": 1.0}})
    with open_scorer(settings) as scorer:
        assert scorer.start(red, LATENTS, ROWS, 16.0).result().total.tolist() == pytest.approx([0.05, 0.85])


@pytest.mark.parametrize("workers", [0, 1])
def test_custom_functions_get_whole_batch_with_metadata(file: str, workers: int) -> None:
    names = [f"{file}:{name}" for name in ("level", "facts", "whole_batch", "waiting")]
    scores = score(config(*(names if workers else names[:3]), workers=workers))
    assert scores.by_name["level"].tolist() == pytest.approx([0.2, 1.0])
    assert scores.by_name["facts"].tolist() == [10 + 16 + 1, 11 + 16]
    assert scores.by_name["whole_batch"].tolist() == pytest.approx([0.4] * 2, abs=1e-3)
    assert not workers or scores.by_name["waiting"].tolist() == [1, 2]


def test_custom_functions_run_in_workers_in_order(file: str) -> None:
    import os

    with open_scorer(config(f"{file}:level", f"{file}:process", workers=1)) as scorer:
        pending = [scorer.start(clips, LATENTS, ROWS, 16.0) for clips in (CLIPS, CLIPS.flip(0))]
        first, second = (item.result() for item in pending)
    assert first.by_name["level"].tolist() == second.by_name["level"].tolist()[::-1] == pytest.approx([0.2, 1.0])
    assert first.by_name["process"][0] != os.getpid()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", r"returned values of shape \[1\] for 2 clips; the shape must be \[2\]"),
        ("not_finite", r'returned nan for "train.txt:2"; rewards must be finite'),
        ("huge", r'returned -1e\+300 for "train.txt:2"; a reward must be between -1e\+12 and 1e\+12; scale it'),
        ("text", r"returned 'good' \(str\); it must return a finite number for each clip"),
        ("texts", r"returned \['1.0', '2.0'\] \(list\); it must return a finite number for each clip"),
        ("broken", r"raised ValueError: no weights"),
    ],
)
def test_failed_function_raises_instead_of_scoring(file: str, name: str, said: str, workers: int) -> None:
    with pytest.raises(RewardError, match=rf'own.py:{name}", clips of "train.txt:1" to "train.txt:2": {said}'):
        score(config(f"{file}:{name}", workers=workers))


@pytest.mark.parametrize(
    "result",
    [
        np.array(["1", "2"]),
        np.array(["1", 2], dtype=object),
        [b"1", b"2"],
        [1.0, "2"],
        [1.0, None],
        [1j, 2j],
        np.array([1 + 1j, 2]),
        torch.tensor([1 + 1j, 2]),
        [torch.tensor(1 + 1j), torch.tensor(2.0)],
        torch.tensor([1.0, 2.0]).to_sparse(),
        [10**400, 1],
        [torch.ones((), requires_grad=True)] * 2,
    ],
)
def test_results_other_than_plain_numbers_are_rejected(result: Any) -> None:
    with pytest.raises(ValueError, match="^returned (.|\n)*; it must return a finite number for each clip"):
        check_scores(result, (CLIPS, ROWS))


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5],
        (True, Fraction(1, 2)),
        np.array([1, 0.5], dtype=object),
        np.float16([1, 0.5]),
        torch.tensor([1, 0.5], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), torch.tensor(0.5)],
    ],
)
def test_scores_may_have_any_numeric_type(result: Any) -> None:
    assert check_scores(result, (CLIPS, ROWS)) == ([1.0, 0.5], {})


@pytest.mark.parametrize(
    ("name", "said"),
    [("dies", r"its worker process died \(exit code 3\)"), ("hangs", "no result within the time limit of 1 s")],
)
def test_crashing_or_hanging_function_raises_an_error(file: str, name: str, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        score(config(f"{file}:{name}", workers=1, time_limit=1.0))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "no reward is configured; set reward.functions"),
        (["brightnes"], 'did you mean "brightness"'),
        (["{file}:one"], r"cannot be called as fn\(clips, samples\)"),
        (["{file}:absent"], 'has no "absent"'),
    ],
)
def test_unusable_function_is_rejected_before_the_run(file: str, names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said), open_scorer(config(*(name.format(file=file) for name in names))):
        pass


def test_running_function_ends_when_scorer_closes(file: str) -> None:
    with open_scorer(config(f"{file}:hangs", workers=1)) as scorer:
        pending = scorer.start(CLIPS, LATENTS, ROWS, 16.0)
    assert pending.futures[0].exception(timeout=20) is not None  # TimeoutError if it still runs


def test_prompt_without_colour_is_rejected() -> None:
    with open_scorer(config("colour")) as scorer, pytest.raises(DataError, match="names no colour"):
        scorer.start(CLIPS[:1], LATENTS, [WorldRow("7", "a ship")], 16.0).result()


def test_builtin_functions_run_while_caller_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = threading.Event()

    def patient(clips: Tensor, samples: Sequence[WorldRow]) -> list[float]:
        assert sampled.wait(timeout=20)
        return [0.5] * len(clips)

    monkeypatch.setitem(BUILT_IN, "brightness", patient)
    with open_scorer(config("brightness")) as scorer:
        pending = scorer.start(CLIPS, LATENTS, ROWS, 16.0)
        sampled.set()
        assert pending.result().total.tolist() == [0.5, 0.5]
