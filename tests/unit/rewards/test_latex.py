"""Rewards for mathematical answers, compared with hand-made scores and with results of cosmos-rl's functions."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("math_verify", reason="needs the package math-verify")

from dsreason.data.types import Sample
from dsreason.rewards import boxed_math, direct_math
from dsreason.rewards.latex import normalise


def asks(answer: str | None) -> Sample:
    return Sample("7", [], answer=answer)


BOXED = [
    (r"\boxed{5}", r"\boxed{5}", 1),
    ("5", r"\boxed{5}", 1),
    (r"\boxed{\frac12}", r"\boxed{0.5}", 1),
    (r"\boxed{6}", r"\boxed{5}", 0),
    (r"\boxed{1,000}", r"\boxed{1000}", 1),
    (r"\boxed{x+1}", r"\boxed{1+x}", 1),
    ("no answer", r"\boxed{5}", 0),
    (r"\boxed{5}", "5", 0),
    (r"\boxed{5}", "$5$", 1),
    (r"\boxed{A}", r"\boxed{A}", 1),
    (r"\boxed{5} or \boxed{6}", r"\boxed{5}", 0),
    (r"\boxed{5}", None, 0),
    ("", r"\boxed{5}", 0),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), BOXED)
def test_boxed_math_compares_boxed_answers(completion, answer, expected):
    assert boxed_math(completion, asks(answer)) == expected


DIRECT = [
    ("Answer: 42", "42", 1),
    ("answer : 42\nbye", "42", 1),
    ("Answer: 41\nAnswer: 42", "42", 1),
    ("Answer: 42\nAnswer: 41", "42", -1),
    (r"Answer: $\frac12$", r"\frac{1}{2}", 1),
    ("Answer: 1,234", "1234", 1),
    ("Answer: 5 cm", "5", 1),
    ("Answer: x=5", "5", 1),
    ("42", "42", -1),
    (r"Answer: \boxed{7}", "7", 1),
    ("Answer: 0.5", r"\frac12", 1),
    ("Answer: $x+1$", "1+x", 1),
    ("Answer: left", "left", 1),
    ("Answer: left", "felt", -1),
    ("Answer: 42 apples", "42", -1),
    ("Answer: $42.$", "42", 1),
    ("Answer: $42$.", "42", 1),
    ("Answer: 42.", "42", 1),
    ("Answer: $1.5.$", "1.5", 1),
    ("Answer: left.", "left", 1),
    ("Answer: it is $42.$ as said", "42", 1),
    (r"Answer: 42\text{.}", "42", 1),
    (r"Answer: \boxed{42.}", "42", 1),
    ("Answer: $4.2$", "42", -1),
    ("Answer: 42", None, -1),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), DIRECT)
def test_direct_math_compares_entire_answers(completion, answer, expected):
    assert direct_math(completion, asks(answer)) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("x = 5", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("1,234,567", "1234567"),
        ("12 dollars", "12"),
        ("an apple", "apple"),
        ("1,2", "12"),
        (r"10\%", r"10\%"),
        (r"5\text{ cm}^2", "5"),
        (r"90^\circ", "90"),
    ],
)
def test_answers_are_normalised_before_comparison(answer, expected):
    assert normalise(answer) == expected


@pytest.mark.parametrize("tower", [r"\boxed{9^{9^{9^9}}}", r"\boxed{99999999!}"])
def test_uncomputable_number_is_graded_wrong_in_time(tower, monkeypatch):
    monkeypatch.setattr("dsreason.rewards.latex.SECONDS", 1)
    assert boxed_math(tower, asks(r"\boxed{5}")) == 0


def test_comparison_works_in_a_thread():
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(boxed_math(r"\boxed{5}", asks(r"\boxed{5}"))))
    thread.start()
    thread.join()
    assert scores == [1.0]
