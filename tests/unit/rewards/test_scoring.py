"""Scoring in worker processes, with several weighted functions and with functions that misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dsreason.config.schema_grpo import RewardConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, RewardError
from dsreason.rewards.scoring import Scorer, applies

FUNCTIONS = """
import asyncio, os, signal, subprocess, sys, time
import dataclasses

@dataclasses.dataclass
class Kept:
    number: float

def length(completion, sample):
    return Kept(len(completion)).number

def right(completion, sample):
    return completion == sample.answer

def with_metrics(completion, sample):
    metrics = {"words": len(completion.split())}
    if sample.id == "1":
        metrics["only_one"] = 5
    return 0.5, metrics

def pid(completion, sample):
    time.sleep(0.05)
    return os.getpid()

async def judge(completion, sample):
    await asyncio.sleep(0.2)
    return 1.0, {"judged": 1}

def raises(completion, sample):
    if sample.id == "2":
        raise KeyError("no such thing")
    return 1.0

async def raises_async(completion, sample):
    if sample.id == "2":
        raise TimeoutError("the judge took too long")
    await asyncio.sleep(0.05)
    return 1.0

def gives(completion, sample):
    return eval(completion)

def hangs(completion, sample):
    if sample.id == "2":
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(command, start_new_session=sample.meta.get("of_its_own", False))
        open(sample.meta["file"], "w").write(f"{os.getpid()} {child.pid}")
        child.wait()
    return 1.0

async def waits(completion, sample):
    if sample.id == "2":
        await asyncio.sleep(60)
    return 1.0

async def blocks(completion, sample):
    await asyncio.sleep(0)
    if sample.id == "2":
        time.sleep(60)
    await asyncio.sleep(0.01)
    return 1.0

def stubborn(completion, sample):
    if sample.id == "2":
        time.sleep(60)
    return 1.0

stubborn.score_on_timeout = -1.0

def dies(completion, sample):
    if sample.id == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def leaves(completion, sample):
    if sample.id == "2":
        os._exit(3)
    return 1.0

def calls_exit(completion, sample):
    sys.exit(3)

async def calls_exit_async(completion, sample):
    sys.exit(3)

def raises_endlessly(completion, sample):
    raise ValueError("y" * 10_000_000)

def answers_twice(completion, sample):
    return 0.25 if os.fork() == 0 else 0.5
"""
SAMPLES = [Sample(str(i), [], answer="a b") for i in range(4)]
COMPLETIONS = ["a b", "a", "", "a b c"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FUNCTIONS)
    return str(path)


def scorer_for(functions, *, start_limit=120.0, **settings):
    return Scorer(RewardConfig(functions=functions, **settings), start_limit=start_limit)


def score(functions, *, completions=COMPLETIONS, samples=SAMPLES, **settings):
    with scorer_for(functions, **settings) as scorer:
        return scorer.score(completions, samples)


def test_scores_are_weighted_and_kept_per_function(file):
    scores = score({f"{file}:length": 0.5, f"{file}:right": 2.0, "exact_match": 1.0})
    assert scores.by_function["length"].tolist() == [3, 1, 0, 5]
    assert scores.by_function["right"].tolist() == scores.by_function["exact_match"].tolist() == [1, 0, 0, 0]
    assert scores.total.tolist() == [4.5, 0.5, 0, 2.5]


def test_metrics_are_summed_over_reporting_calls(file):
    scores = score({f"{file}:with_metrics": 1.0})
    assert scores.metric_sums == {"with_metrics/words": (6.0, 4), "with_metrics/only_one": (5.0, 1)}


def test_async_functions_run_concurrently(file):
    with scorer_for({f"{file}:judge": 1.0}, workers=1) as scorer:
        begin = time.monotonic()
        scores = scorer.score(["x"] * 40, SAMPLES * 10)
        assert time.monotonic() - begin < 4  # one after another would take 8 s
    assert scores.total.tolist() == [1.0] * 40
    assert scores.metric_sums == {"judge/judged": (40.0, 40)}


def test_work_is_shared_by_persistent_workers(file):
    with scorer_for({f"{file}:pid": 1.0}, workers=2) as scorer:
        first, second = ({*scorer.score(["x"] * 8, SAMPLES * 2).total} for _ in range(2))
    assert first == second
    assert len(first) == 2
    assert os.getpid() not in first


def test_options_reach_the_workers():
    assert score({"format": 1.0}, options={"format": {"pattern": "a.*"}}).total.tolist() == [1, 1, 0, 1]


def test_empty_input_is_accepted(file):
    assert score({f"{file}:length": 1.0}, completions=[], samples=[]).total.tolist() == []


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        ("raises", ["raised KeyError: 'no such thing'", 'raise KeyError("no such thing")', "mine.py"]),
        ("raises_async", ["raised TimeoutError: the judge took too long"]),
        ("dies", ["killed by SIGKILL, often because memory is exhausted"]),
        ("leaves", ["exit code 3"]),
    ],
)
def test_failing_function_is_reported_with_sample(file, function, texts):
    with pytest.raises(RewardError) as error:
        score({"exact_match": 1.0, f"{file}:{function}": 1.0})
    for text in [f'reward "{file}:{function}", sample "2":', *texts]:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("calls_exit", "raised SystemExit: 3"),
        ("calls_exit_async", "raised SystemExit: 3"),
        ("raises_endlessly", "raised ValueError: yyyy"),
    ],
)
def test_unusual_function_exit_is_reported_briefly(file, function, text, capfd):
    with pytest.raises(RewardError) as error:
        score({f"{file}:{function}": 1.0}, workers=1)
    assert f'reward "{file}:{function}", sample "0": {text}' in str(error.value)
    assert len(str(error.value)) < 10_000
    assert capfd.readouterr().err == ""


def test_forked_worker_does_not_answer_for_original(file):
    for _ in range(2):
        assert score({f"{file}:answers_twice": 1.0}, workers=1).total.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("float('nan')", "nan"),
        ("float('inf')", "inf"),
        ("'1.0'", "'1.0'"),
        ("[1.0]", "list"),
        ("(1.0, {'a': float('nan')})", "metric 'a'"),
        ("(1.0, 2.0)", "as metrics; they must be a dict"),
        ("1j", "complex"),
        ("1e300", "a reward must be between -1e+12 and 1e+12; scale it"),
        ("(-1e13, {})", "a reward must be between -1e+12 and 1e+12; scale it"),
    ],
)
def test_nonfinite_or_non_numeric_result_is_rejected(file, value, text):
    with pytest.raises(RewardError) as error:
        score({f"{file}:gives": 1.0}, completions=["1", "True", value, "2"], workers=1)
    assert f'reward "{file}:gives", sample "2": returned' in str(error.value)
    assert text in str(error.value)


def test_numpy_numbers_and_booleans_are_valid_scores(file):
    completions = ["__import__('numpy').float32(0.5)", "True", "__import__('numpy').int64(2)", "(1, {})"]
    assert score({f"{file}:gives": 1.0}, completions=completions).total.tolist() == [0.5, 1, 2, 1]


def test_scalars_of_other_packages_are_valid_scores(file):
    numpy, torch = "__import__('numpy')", "__import__('torch')"
    completions = [f"{numpy}.True_", f"{numpy}.array(0.25)", f"{torch}.tensor(3)", f"({torch}.tensor(0.5), {{}})"]
    assert score({f"{file}:gives": 1.0}, completions=completions).total.tolist() == [1, 0.25, 3, 0.5]


def test_array_with_dimensions_is_rejected(file):
    with pytest.raises(RewardError, match=r'sample "0": returned array\(\[1\]\)'):
        score({f"{file}:gives": 1.0}, completions=["__import__('numpy').array([1])"], samples=SAMPLES[:1])


def test_missing_score_is_omitted_from_total(file):
    scores = score({f"{file}:gives": 2.0}, completions=["None", "(None, {'tried': 1})", "0.5", "-1"])
    assert np.isnan(scores.total).tolist() == [True, True, False, False]
    assert scores.total[2:].tolist() == [1.0, -2.0]
    assert scores.metric_sums == {"gives/tried": (1.0, 1)}


def test_missing_score_does_not_affect_other_functions(file):
    scores = score({f"{file}:gives": 2.0, "format": 1.0}, completions=["None"], samples=SAMPLES[:1])
    assert scores.total.tolist() == [0.0]
    assert np.isnan(scores.by_function["gives"]).tolist() == [True]


def test_reward_scores_only_selected_rows(file):
    samples = [Sample(str(i), [], answer="a b", meta={"data_source": name}) for i, name in enumerate("xxyz")]
    only = {f"{file}:length": {"data_source": ["x"]}, "exact_match": {"data_source": ["y", "z"]}}
    scores = score({f"{file}:length": 0.5, "exact_match": 4.0}, samples=samples, only=only)
    assert scores.total.tolist() == [1.5, 0.5, 0, 0]
    assert np.isnan(scores.by_function["length"]).tolist() == [False, False, True, True]
    assert np.isnan(scores.by_function["exact_match"]).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("meta", "values", "selected"),
    [
        ({"label": {"weather": "rain"}}, {"label.weather": ["rain"]}, True),
        ({"level": 3}, {"level": [2, 3]}, True),
        ({"hard": True}, {"hard": [True]}, True),
        ({"level": 3}, {"level": [3], "kind": ["yes_no"]}, False),
        ({}, {"level": [3]}, False),
    ],
)
def test_rows_are_selected_by_any_field(meta, values, selected):
    assert applies({"format": values}, "format", Sample("0", [], meta=meta)) == selected
    assert applies({"format": values}, "other", Sample("0", [], meta=meta))


def test_best_accepted_answer_counts(file):
    samples = [Sample("0", [], answer="a", other_answers=("b", "c")), Sample("1", [], answer="a")]
    scores = score({"exact_match": 1.0, f"{file}:right": 1.0}, completions=["c", "c"], samples=samples)
    assert scores.by_function["exact_match"].tolist() == [1, 0]
    assert scores.by_function["right"].tolist() == [0, 0]  # a user's function decides itself which answers count


def test_duration_of_calls_is_reported(file):
    with scorer_for({f"{file}:pid": 1.0}) as scorer:
        scores, _ = scorer.score_by_function(["x"], SAMPLES[:1])
    assert 0.05 <= scores["pid"][0].seconds < 1


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def group_gone(pid: int, seconds: float = 10) -> bool:
    """Return whether the process group is empty; a killed orphan stays until init has reaped it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("of_its_own", [False, True], ids=["", "in a session of its own"])
def test_hanging_function_is_killed_with_its_children(file, tmp_path, of_its_own):
    meta = {"file": str(tmp_path / "pid"), "of_its_own": of_its_own}
    samples = [Sample(str(i), [], meta=meta) for i in range(4)]
    with scorer_for({f"{file}:hangs": 1.0}, time_limit=1.0) as scorer:
        begin = time.monotonic()
        with pytest.raises(RewardError) as error:
            scorer.score(COMPLETIONS, samples)
        assert time.monotonic() - begin < 4
    assert f'reward "{file}:hangs", sample "2": returned no result within the time limit of 1 s' in str(error.value)
    worker, child = map(int, (tmp_path / "pid").read_text().split())
    assert gone(worker)
    assert group_gone(child if of_its_own else worker)


@pytest.mark.parametrize("function", ["waits", "blocks"])
def test_slow_async_function_is_reported_with_sample(file, function):
    samples = SAMPLES if function == "waits" else SAMPLES[2:3]
    with (
        scorer_for({f"{file}:{function}": 1.0}, time_limit=0.5, workers=1) as scorer,
        pytest.raises(RewardError) as error,
    ):
        scorer.score(COMPLETIONS[: len(samples)], samples)
    assert f'reward "{file}:{function}", sample "2": returned no result within the time limit of 0.5 s' in str(
        error.value
    )
    assert ("event loop" in str(error.value)) == (function == "blocks")


def test_function_may_define_score_after_timeout(file, caplog):
    samples = [Sample(str(i), [], answer="a b") for i in range(16)]  # a worker gets four calls at a time
    functions = {f"{file}:stubborn": 1.0, "exact_match": 1.0}
    scores = score(functions, completions=COMPLETIONS * 4, samples=samples, time_limit=1.0, workers=1)
    assert scores.by_function["stubborn"].tolist() == [1, 1, -1] + [1] * 13
    assert scores.by_function["exact_match"].tolist() == [1, 0, 0, 0] * 4
    assert scores.metric_sums == {"stubborn/timeouts": (1.0, 16)}
    assert 'sample "2": returned no result within the time limit of 1 s; its score is -1' in caplog.text


def test_time_limit_applies_per_call(file):
    assert score({f"{file}:pid": 1.0}, completions=["x"] * 40, samples=SAMPLES * 10, workers=1, time_limit=1.0)


def test_error_leaves_no_worker_running(file):
    with scorer_for({f"{file}:raises": 1.0}) as scorer:
        with pytest.raises(RewardError):
            scorer.score(COMPLETIONS, SAMPLES)
        with pytest.raises(RuntimeError, match="not running"):
            scorer.score(COMPLETIONS, SAMPLES)


def test_missing_function_is_a_startup_config_error(file):
    with pytest.raises(ConfigError, match='has no "nothing"'), scorer_for({f"{file}:nothing": 1.0}):
        pass


def test_slow_or_dying_import_is_reported(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    (tmp_path / "dead.py").write_text("import os; os._exit(5)")
    with pytest.raises(RewardError, match="has not imported .*slow.py within the time limit of 2 s"):
        score({str(tmp_path / "slow.py"): 1.0}, start_limit=2.0, workers=1)
    with pytest.raises(RewardError, match=r"died while importing .*dead.py \(exit code 5\)"):
        score({str(tmp_path / "dead.py"): 1.0}, workers=1)


def test_unpicklable_sample_is_reported(file):
    with pytest.raises(RewardError, match='sample "9"'):
        score({f"{file}:length": 1.0}, completions=["a"], samples=[Sample("9", [], meta={"f": lambda: 0})])


def test_workers_exit_when_trainer_is_killed(file, tmp_path):
    """Include a worker that hangs in a reward."""
    code = f"""
from dsreason.config.schema_grpo import RewardConfig
from dsreason.data.types import Sample
from dsreason.rewards.scoring import Scorer
with Scorer(RewardConfig(functions={{"{file}:hangs": 1.0}}, time_limit=600, workers=1)) as scorer:
    scorer.score([""], [Sample("2", [], meta={{"file": "{tmp_path / "pid"}"}})])
"""
    trainer = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 120)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    worker = int((tmp_path / "pid").read_text().split()[0])
    wait_for(lambda: gone(worker) or Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z", 120)


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
