"""The lookup of reward functions by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dsreason.rewards as rewards
from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.rewards.functions import find_reward, make_reward_labels

SAMPLE = Sample("7", [], answer="A")
TWO = """
import math

def long(completion, sample):
    return float(len(completion))

def judge(completion, sample, scale=1.0):
    return scale

def _helper():
    pass

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.py"
    path.write_text(TWO)
    return path


@pytest.mark.parametrize("name", rewards.BUILT_IN)
def test_built_in_rewards_are_found_and_importable(name):
    assert find_reward(name) is getattr(rewards, name)


def test_reward_is_found_in_file_or_package(file):
    assert find_reward(f"{file}:long")("abc", SAMPLE) == 3
    assert find_reward("dsreason.rewards.text:gsm8k") is rewards.gsm8k


def test_reward_file_needs_no_attribute_when_unambiguous(tmp_path):
    (tmp_path / "one.py").write_text("from math import sqrt\ndef f(completion, sample): return 1.0")
    (tmp_path / "named.py").write_text("def f(): ...\ndef reward(completion, sample): return 2.0")
    assert find_reward(str(tmp_path / "one.py"))("", SAMPLE) == 1
    assert find_reward(str(tmp_path / "named.py"))("", SAMPLE) == 2


def test_options_are_passed_to_every_call(file):
    assert find_reward(f"{file}:judge", {"scale": 3.0})("", SAMPLE) == 3
    assert find_reward("format", {"pattern": "x+"})("xx", SAMPLE) == 1


def test_importing_rewards_loads_neither_torch_nor_sympy():
    code = "import sys, dsreason.rewards.worker; print([m for m in ('torch', 'sympy', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("name", "needed"), [("boxed_math", True), ("direct_math", True), ("format", False)])
def test_sympy_is_imported_when_reward_is_found(name, needed):
    code = "import sys; from dsreason.rewards.functions import find_reward; find_reward(sys.argv[1])"
    code += "; print('sympy' in sys.modules)"
    completed = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
    assert completed.stdout == f"{needed}\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("single_choise", 'did you mean "single_choice"'),
        ("nothing", "Built-in rewards: format, single_choice"),
        ("no.such.package:f", "was not found"),
        ("/no/such/file.py", "/no/such/file.py: does not exist"),
        ("{file}", "long, judge"),
        ("{file}:lonk", 'did you mean "long"'),
        ("{file}:NUMBER", "must be a function; got an object of type int"),
        ("{file}:_helper", "cannot be called as fn(completion, sample)"),
        ("dsreason.rewards.text:formal", 'dsreason.rewards.text has no "formal"; did you mean "format"'),
    ],
)
def test_unknown_reward_error_explains_cause(name, text, file):
    with pytest.raises(ConfigError) as error:
        find_reward(name.replace("{file}", str(file)))
    assert text in str(error.value)


def test_unknown_option_is_rejected():
    with pytest.raises(ConfigError, match="unexpected keyword argument 'patern'"):
        find_reward("format", {"patern": "x"})


@pytest.mark.parametrize(
    ("source", "text"),
    [("1 / 0", "ZeroDivisionError"), ("import no_such_package", "no_such_package"), ("def", "SyntaxError")],
)
def test_import_failure_is_reported_with_cause(tmp_path, source, text):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ConfigError, match=f"bad.py cannot be imported: .*{text}"):
        find_reward(str(tmp_path / "bad.py"))


def test_reward_labels_are_short_when_unambiguous():
    assert make_reward_labels(["format", "a/b.py", "a/c.py:judge", "x.y:judge", "remote:vq"]) == [
        "format",
        "b",
        "a/c.py:judge",
        "x.y:judge",
        "vq",
    ]
