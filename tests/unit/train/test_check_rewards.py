"""Checks of rewards before sampling begins."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError, RewardError
from dsreason.rewards.text import COSMOS_FORMAT, REQUEST
from dsreason.train.grpo.check_rewards import (
    build_row_check,
    check_answer,
    check_format,
    check_functions,
    try_user_functions,
)

OPTIONS = {"A": "left", "B": "to the right"}
SPACE = "Answer in the following format: <think> your reasoning </think> <answer> your answer </answer>."


def config(*names: str, **reward: Any) -> GRPOConfig:
    return GRPOConfig.model_validate({"reward": {"functions": dict.fromkeys(names, 1.0), **reward}})


def asks(question: str, system: str = "", answer: str | None = "A") -> Sample:
    content = [{"type": "video", "video": "/d/7.mp4"}, {"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "<answer>A</answer>"}]
    return Sample("7", messages, answer=answer)


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text("def judge(completion, sample, *, strict):\n    return 1.0\n")
    return f"{tmp_path / 'mine.py'}:judge"


def test_available_reward_functions_pass(own, monkeypatch):
    monkeypatch.setenv("REMOTE_REWARD_URL", "http://127.0.0.1:9/score")  # no server is running, and none is contacted
    options = {"format": {"pattern": COSMOS_FORMAT}, "overlong": {"buffer": 100}, own: {"strict": True}}
    check_functions(config("format", "overlong", own, "remote:quality", options=options))


@pytest.mark.parametrize(
    ("names", "reward", "text"),
    [
        (["frmat"], {}, "frmat"),
        (["format"], {"options": {"format": {"patern": "x"}}}, "patern"),
        (["overlong"], {"options": {"overlong": {"buffer": 4096}}}, r"overlong.buffer \(4096\): .*1024"),
        (["overlong"], {"options": {"overlong": {"buffer": "long"}}}, r"overlong.buffer \('long'\)"),
        (["remote:"], {"remote": {"url": "http://host"}}, "remote:<score>"),
        (["remote:a"], {"remote": {"url": "http://host"}, "options": {"remote:a": {"b": 1}}}, "has no options"),
        (["remote:a"], {}, "REMOTE_REWARD_URL.*reward.remote.url"),
        (["remote:a"], {"remote": {"url": "host/score"}}, "http://"),
        (["remote:a"], {"remote": {"url": "http:///score"}}, "http://host"),
    ],
)
def test_unusable_reward_function_is_named(names, reward, text, monkeypatch):
    for name in ("REMOTE_REWARD_URL", "WFM_REWARD_URL", "REMOTE_REWARD_ENQUEUE_URL", "WFM_REWARD_ENQUEUE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=text):
        check_functions(config(*names, **reward))


def test_user_reward_must_accept_its_options(own):
    with pytest.raises(ConfigError, match="strict"):
        check_functions(config(own))


@pytest.mark.parametrize(
    ("reward", "answer", "options"),
    [
        ("format", None, None),
        ("overlong", None, None),
        ("single_choice", "A", OPTIONS),
        ("single_choice", "<answer>b</answer>", OPTIONS),
        ("single_choice", "left", OPTIONS),
        ("single_choice", "AB", OPTIONS),
        ("single_choice", "E", None),
        ("single_choice_lenient", "(B) to the right", OPTIONS),
        ("ordinal_choice", "4", {"1": "bad", "4": "good"}),
        ("ordinal_choice", "4", None),
        ("gsm8k", "so it is\n#### 1,000", None),
        ("gsm8k", " 72", None),
        ("boxed_math", "$5$", None),
        ("boxed_math", "\\frac{1}{2}", None),
        ("direct_math", "5", None),
        ("exact_match", "left", None),
    ],
)
def test_matchable_reference_passes(reward, answer, options):
    check_answer([reward], {}, Sample("7", [], answer=answer, options=options))


@pytest.mark.parametrize(
    ("reward", "answer", "options", "text"),
    [
        ("exact_match", None, None, "sample '7': field 'answer' is None, but the reward exact_match"),
        ("direct_math", " ", None, "field 'answer' is ' '"),
        ("single_choice", 4, None, "field 'answer' is 4"),
        (
            "single_choice",
            "E",
            OPTIONS,
            r"field 'answer' is 'E', but the reward single_choice needs one of the options A, B",
        ),
        ("single_choice_lenient", "(C)", OPTIONS, "needs one of the options"),
        ("ordinal_choice", "<answer>c</answer>", OPTIONS, "needs one of the options"),
        ("gsm8k", "seventy-two", None, "#### number"),
        ("boxed_math", "5", None, r"write \\boxed\{5\}"),
    ],
)
def test_unmatchable_reference_is_rejected(reward, answer, options, text):
    with pytest.raises(DataError, match=text):
        check_answer(["format", reward], {}, Sample("7", [], answer=answer, options=options))


def test_rows_are_checked_only_for_builtin_rewards(own):
    check = pickle.loads(
        pickle.dumps(build_row_check(config("exact_match", own, "remote:a")))
    )  # it is sent to the data workers
    with pytest.raises(DataError, match="exact_match"):
        check(asks("q", answer=None))
    build_row_check(config("format", own, "remote:a"))(asks("q", answer=None))


def test_rows_are_checked_only_for_rewards_that_score_them():
    only = {"gsm8k": {"data_source": ["math"]}}
    check = build_row_check(config("gsm8k", "exact_match", only=only))
    check(replace(asks("q"), meta={"data_source": "other"}))
    with pytest.raises(DataError, match="reward gsm8k needs a number"):
        check(replace(asks("q"), meta={"data_source": "math"}))


def test_every_accepted_answer_is_checked():
    sample = Sample("7", [], answer="72", other_answers=("seventy-two",))
    with pytest.raises(DataError, match="field 'answer' is 'seventy-two', but the reward gsm8k needs a number"):
        check_answer(["gsm8k"], {}, sample)


def test_entries_of_only_need_functions_and_values():
    with pytest.raises(ValueError, match="only has entries for format"):
        config("exact_match", only={"format": {"a": ["b"]}})
    with pytest.raises(ValueError, match="only.format selects no rows"):
        config("format", only={"format": {"a": []}})


TRIED = """
def length(completion, sample):
    return float(len(completion))

def fails(completions, completion_ids, level, **kwargs):
    assert [completion[0]["content"] for completion in completions] == ["left"] and completion_ids == [[4]]
    raise ValueError(f"level {level}")

def waits(completion, sample):
    import time
    time.sleep(60)
"""


def try_functions(tmp_path: Path, *names: str, **reward: Any) -> None:
    (tmp_path / "mine.py").write_text(TRIED)
    rows = [
        (f"rows.jsonl, row {i}", replace(asks("q"), id=str(i), answer="left", meta={"level": i})) for i in range(1, 4)
    ]
    own = [f"{tmp_path / 'mine.py'}:{name}" for name in names]
    only = {f"{tmp_path / 'mine.py'}:{name}": fields for name, fields in reward.pop("only", {}).items()}
    try_user_functions(config(*own, "exact_match", only=only, **reward), rows, lambda text: [len(text)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fails", r"rows.jsonl, row 2: reward .*mine.py:fails\", sample \"2\": raised ValueError: level \[2\]"),
        ("waits", r"row 2: reward .*mine.py:waits.* within the time limit of 0.5 s"),
    ],
)
def test_custom_reward_is_tried_on_selected_row(tmp_path, name, text):
    with pytest.raises(RewardError, match=text) as error:
        try_functions(tmp_path, "length", name, only={name: {"level": [2]}}, time_limit=0.5)
    assert "row's answer as completion ('left')" in str(error.value)


def test_custom_reward_without_rows_is_reported(tmp_path, caplog):
    try_functions(tmp_path, "length", "fails", only={"fails": {"level": [4]}})
    assert 'mine.py:fails": reward.only selects none of the 3 rows that were inspected' in caplog.text


def test_reward_servers_are_not_called_by_check(tmp_path, monkeypatch):
    monkeypatch.setenv("REMOTE_REWARD_URL", "http://127.0.0.1:9/score")  # no server is running
    settings = config("judge", "remote:quality", "exact_match")
    try_user_functions(settings, [("rows.jsonl, row 1", asks("q"))], lambda text: [])


@pytest.mark.parametrize(
    ("samples", "pattern"),
    [
        ([asks("q", REQUEST)], None),
        ([asks("q", REQUEST)], COSMOS_FORMAT),
        ([asks(f"Which?\n{SPACE}")], None),
        ([asks("Is <b>x</b> red?", SPACE), asks("q", SPACE)], None),
        ([asks("q", "Put it into <box>…</box>")], "<box>.*</box>"),
        ([], None),
    ],
)
def test_prompt_requesting_the_format_passes(samples, pattern):
    options = {"format": {"pattern": pattern}} if pattern else {}
    check_format(config("format", options=options), samples)


@pytest.mark.parametrize(
    ("sample", "pattern", "words"),
    [
        (asks("q"), None, ["requests no format", "data.system_prompt", REQUEST.splitlines()[0]]),
        (asks("q", SPACE), COSMOS_FORMAT, [repr(COSMOS_FORMAT), "</think> <answer>", "format.pattern"]),
        (asks("q", REQUEST), "<box>.*</box>", ["'<box>.*</box>'", "your reasoning"]),
        (asks("q", REQUEST), "(", ["reward.options.format.pattern ('(')"]),
        (asks("q", REQUEST), 3, ["reward.options.format.pattern (3)"]),
    ],
)
def test_prompt_requesting_other_format_is_rejected(sample, pattern, words):
    options = {"format": {"pattern": pattern}} if pattern else {}
    with pytest.raises(ConfigError) as error:
        check_format(config("format", options=options), [sample, sample])
    assert [word for word in words if word not in str(error.value)] == [], error.value


def test_format_request_is_optional_without_format_reward():
    check_format(config("exact_match"), [asks("q")])
