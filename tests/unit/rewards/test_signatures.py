"""Reward functions with the signatures of TRL, verl and ms-swift."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsreason.config.schema_grpo import RewardConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, RewardError
from dsreason.rewards.functions import find_reward
from dsreason.rewards.scoring import Scorer

FUNCTIONS = """
import asyncio, time
import numpy as np

def prompts_seen(prompts, completions, level, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(len(prompt[-1]["content"])) + step for prompt, step in zip(prompts, level)]

def batch_size(completions, **kwargs):
    return [float(len(completions))] * len(completions)

def texts(completions: list[str], **kwargs):
    return [float(len(text)) for text in completions]

def kinds(completions, prompts):
    return [float(isinstance(completion, str) and isinstance(prompt, str)) for completion, prompt in zip(completions, prompts)]

def messages(completions, solution, answer):
    return [float(c[0]["content"] == s == a and c[0]["role"] == "assistant") for c, s, a in zip(completions, solution, answer)]

def truth(completions, ground_truth):
    return np.array([completion[0]["content"] in truth for completion, truth in zip(completions, ground_truth)])

async def waits(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [0.5 for _ in completions]

def tensor(completions, **kwargs):
    import torch
    return torch.arange(len(completions))

def none_for_empty(completions, **kwargs):
    return [None if completion[0]["content"] == "" else 1 for completion in completions]

def lengths(completion_ids, **kwargs):
    return [len(ids) for ids in completion_ids]

def needs_state(completions, trainer_state, **kwargs):
    return [trainer_state.global_step for _ in completions]

def may_have_state(completions, trainer_state=None, log_extra=None):
    return [float(trainer_state is None and log_extra is None) for _ in completions]

def short(completions, **kwargs):
    return [1.0]

def nan(completions, **kwargs):
    return [float("nan") for _ in completions]

def number(completions, **kwargs):
    return 1.0

def slow(completions, **kwargs):
    time.sleep(60)

def scaled(completions, factor=1.0, **kwargs):
    return [factor for _ in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "math":
        return {"score": solution_str == ground_truth, "acc": True, "pred": solution_str, "index": extra_info["index"]}
    return float(ground_truth in solution_str)

def verl_with_option(data_source, solution_str, ground_truth, extra_info, bonus):
    return bonus

def unknown(text, label, weight):
    return 1.0

class ORM:
    pass

class Contains(ORM):
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, completions, solution, **kwargs) -> list[float]:
        assert kwargs["messages"][0][-1] == {"role": "assistant", "content": completions[0]}
        return [self.scale * float(answer in completion) for completion, answer in zip(completions, solution)]

class Fails:
    def __init__(self, args):
        pass

    def __call__(self, completions, **kwargs):
        return []
"""
ASKED = [{"role": "user", "content": "2 + 2?"}]


def sample(number: int, answer: str | None = "4", text: bool = False, **meta: object) -> Sample:
    reply = [] if answer is None else [{"role": "assistant", "content": answer}]
    return Sample(str(number), [*ASKED, *reply], answer=answer, meta=meta, has_text_prompt=text)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "others.py"
    path.write_text(FUNCTIONS)
    return str(path)


def score(function, completions, samples, ids=None, options=None, **settings):
    config = RewardConfig(functions={function: 1.0}, options={function: options or {}}, workers=1, **settings)
    with Scorer(config) as scorer:
        return scorer.score(completions, samples, ids)


@pytest.mark.parametrize(
    ("function", "completions", "samples", "expected"),
    [
        ("prompts_seen", ["a", "b"], [sample(1, level=1), sample(1, level=1)], [7, 7]),
        ("batch_size", ["a", "b", "c", "d"], [sample(1), sample(1), sample(1), sample(2)], [3, 3, 3, 1]),
        ("texts", ["abc", ""], [sample(1), sample(1)], [3, 0]),
        ("kinds", ["abc"], [sample(1, text=True)], [1]),
        ("kinds", ["abc"], [sample(1)], [0]),
        ("messages", ["4", "5"], [sample(1), sample(1)], [1, 0]),
        ("truth", ["4", "5"], [sample(1, ground_truth=["4", "four"])] * 2, [1, 0]),
        ("waits", ["a"] * 3, [sample(i) for i in range(3)], [0.5] * 3),
        ("tensor", ["a"] * 3, [sample(1)] * 3, [0, 1, 2]),
        ("may_have_state", ["a"], [sample(1)], [1]),
        ("Contains", ["is 4", "5"], [sample(1), sample(1)], [1, 0]),
    ],
)
def test_batched_functions_get_columns_of_a_group(file, function, completions, samples, expected):
    assert score(f"{file}:{function}", completions, samples).total.tolist() == expected


def test_none_in_batch_means_no_score(file):
    total = score(f"{file}:none_for_empty", ["a", "", "b"], [sample(1)] * 3).total
    assert np.isnan(total).tolist() == [False, True, False]


def test_completion_ids_are_passed(file):
    assert score(f"{file}:lengths", ["a", "b"], [sample(1)] * 2, [(1, 2), (3,)]).total.tolist() == [2, 1]


def test_options_are_arguments_of_functions_and_classes(file):
    assert score(f"{file}:scaled", ["a"], [sample(1)], options={"factor": 3.0}).total.tolist() == [3]
    assert score(f"{file}:Contains", ["4"], [sample(1)], options={"scale": 2.0}).total.tolist() == [2]


def test_verl_score_is_read_from_dict_or_number(file):
    samples = [
        sample(1, data_source="math", reward_model={"ground_truth": "4"}, extra_info={"index": 7}),
        sample(2, data_source="other"),
    ]
    scores = score(f"{file}:compute_score", ["4", "it is 4"], samples)
    assert scores.total.tolist() == [1, 1]
    assert scores.metric_sums == {"compute_score/acc": (1.0, 1), "compute_score/index": (7.0, 1)}


def test_verl_function_is_found_in_its_file(file):
    assert find_reward(file)("is 4", sample(2, data_source="other")) == 1


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("prompts_seen", 'sample "1": the function needs level, which this row does not have; it has answer'),
        ("lengths", "needs completion_ids"),
        ("compute_score", "needs data_source"),
        ("short", r"returned 1 values for 2 completions"),
        ("nan", r"returned nan \(float\)"),
        ("number", r"returned 1.0 \(float\) for 2 completions; it must return a list"),
        ("slow", "returned no result within the time limit of 0.5 s"),
    ],
)
def test_failing_call_names_reward_and_sample(file, function, text):
    with pytest.raises(RewardError, match=text) as error:
        score(f"{file}:{function}", ["a", "b"], [sample(1), sample(1)], time_limit=0.5)
    assert f'reward "{file}:{function}", sample "1"' in str(error.value)
    assert ("Traceback" in str(error.value)) is False


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        ("needs_state", {}, "needs the argument trainer_state, which rewards do not get"),
        ("verl_with_option", {}, "needs the argument bonus"),
        ("compute_score", {"bonus": 1}, "has no parameter bonus"),
        ("unknown", {}, r"cannot be called as fn\(completion, sample\).*\[TRL\].*\[verl\].*\[ms-swift\]"),
        ("Fails", {}, r"Fails\(\) raised TypeError.*args"),
        ("Contains", {"factor": 1}, r"Contains\(factor=…\) raised TypeError"),
    ],
)
def test_unsuitable_signature_is_a_config_error(file, function, options, text):
    with pytest.raises(ConfigError, match=text):
        find_reward(f"{file}:{function}", options)


def test_class_is_found_in_file_without_functions(tmp_path: Path):
    (tmp_path / "orm.py").write_text("class Right:\n    def __call__(self, completions, **kwargs): return [1.0]\n")
    assert score(str(tmp_path / "orm.py"), ["a"], [sample(1)]).total.tolist() == [1]


THOUGHTS = ["<think>\nso\n</think>\nfour", "<think>so", "four", "<think>a</think><think>b</think>c"]
FORMULAS = [r"it is \boxed{\frac{1}{3}}", r"it is \boxed{\frac{1}{2}}", "no formula", r"\boxed{0.3333}"]


@pytest.mark.parametrize(
    ("name", "completions", "solution"),
    [
        ("think_format_reward", THOUGHTS, "4"),
        ("accuracy_reward", FORMULAS, r"\frac{1}{3}"),
        ("accuracy_reward", FORMULAS, "no formula either"),
        ("reasoning_accuracy_reward", [f"<think>so</think> {text}" for text in FORMULAS], r"\frac{1}{3}"),
    ],
)
def test_trl_reward_scores_match_a_direct_call(name, completions, solution):
    trl_rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    expected = getattr(trl_rewards, name)(messages, solution=[solution] * len(messages))
    scores = score(f"trl.rewards:{name}", completions, [sample(1, solution)] * len(completions), time_limit=120)
    values = [None if np.isnan(value) else value for value in scores.total]
    assert values == expected


def test_trl_length_reward_may_come_from_file(tmp_path: Path):
    pytest.importorskip("trl.rewards")
    (tmp_path / "soft.py").write_text(
        "from trl.rewards import get_soft_overlong_punishment\n"
        "soft = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)\n"
    )
    total = score(f"{tmp_path / 'soft.py'}:soft", ["a", "b"], [sample(1)] * 2, [[1] * 90, [1] * 101]).total
    assert total.tolist() == [-0.5, -1]
