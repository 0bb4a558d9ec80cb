"""The reward for numbers with tolerances, units, percent signs and separators."""

from __future__ import annotations

import pytest

from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.rewards import numeric


def worth(completion, answer, **options):
    return numeric(completion, Sample("7", [], answer=answer), **options)


@pytest.mark.parametrize(
    ("completion", "answer", "options", "expected"),
    [
        ("<think>about 4</think><answer>3.2 m</answer>", "3.2 m", {}, 1.0),
        ("3.2", "3.2 m", {}, 1.0),
        ("3.2 m", "3.20", {}, 1.0),
        ("320 cm", "3.2 m", {}, 1.0),
        ("3.2 cm", "3.2 m", {}, 0.0),
        ("3.2 s", "3.2 m", {}, 0.0),
        ("320 cm", "3.2", {"unit": "m"}, 1.0),
        ("1,234.5 kg", "1234.5", {}, 1.0),
        ("3.3", "3.2", {"absolute": 0.1}, 1.0),
        ("3.31", "3.2", {"absolute": 0.1}, 0.0),
        ("110", "100", {"relative": 0.1}, 1.0),
        ("-110", "-100", {"relative": 0.1}, 1.0),
        ("111", "100", {"relative": 0.1}, 0.0),
        ("111", "100", {"relative": 0.1, "absolute": 11.0}, 1.0),
        ("12 %", "12%", {}, 1.0),
        ("12", "12%", {}, 1.0),
        ("0.12", "12%", {}, 1.0),
        ("12%", "0.12", {}, 1.0),
        ("12%", "12", {}, 1.0),
        ("0.12", "12", {}, 0.0),
        ("150", "100", {"score": "relative"}, 0.5),
        ("300", "100", {"score": "relative"}, 0.0),
        ("105", "100", {"score": "relative", "relative": 0.05}, 1.0),
        ("112", "100", {"score": "mra"}, 0.8),  # 0.12 < 1 - level for the levels 0.5 … 0.85, which are eight of ten
        ("100", "100", {"score": "mra"}, 1.0),
        ("200", "100", {"score": "mra"}, 0.0),
        ("0", "0", {}, 1.0),
        ("0.1", "0", {"score": "relative"}, 0.0),
        ("3 to 4 m", "3.2 m", {"absolute": 1.0}, 0.0),
        ("far away", "3.2 m", {"absolute": 100.0}, 0.0),
        ("", "0", {}, 0.0),
    ],
)
def test_numeric_score_depends_on_tolerance_and_unit(completion, answer, options, expected):
    assert worth(completion, answer, **options) == pytest.approx(expected)


def test_error_metric_uses_unit_of_reference():
    assert worth("350 cm", "3 m", metrics=True) == (0.0, {"read": 1.0, "error": pytest.approx(0.5)})
    assert worth("3 s", "3 m", metrics=True) == (0.0, {"read": 1.0})
    assert worth("far", "3 m", metrics=True) == (0.0, {"read": 0.0})


@pytest.mark.parametrize("answer", [None, " ", "far", "3 to 4 m", "1, 2, 3"])
def test_reference_without_single_number_is_rejected(answer):
    with pytest.raises(DataError, match="sample '7'.*no single number"):
        worth("3", answer)
