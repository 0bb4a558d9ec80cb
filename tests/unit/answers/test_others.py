"""Comparison of parsers on the same responses: dsreason reads more answers than VLMEvalKit and lmms-eval, and misreads fewer.

A file holds the results of the other two parsers; `benchmarks/answer_reading.py` writes it if their packages are
installed.
"""

from __future__ import annotations

import pytest

from benchmarks.answer_reading import OURS, Counts, Row, count_outcomes, format_table, load_others, load_rows, read_ours
from tests.docs import ROOT

ROWS = load_rows()
OTHERS = load_others()


@pytest.fixture(scope="module")
def own() -> str:
    return read_ours(ROWS)


def test_parser_test_responses_are_numerous_and_varied():
    """Each part must contain responses without an answer, responses with 2 to 10 options and responses without options."""
    assert len(ROWS) >= 300
    assert len({(row.response, str(row.options)) for row in ROWS}) == len(ROWS)
    for part in ("tuned", "held-out"):
        rows = [row for row in ROWS if row.part == part]
        assert len(rows) >= 100
        assert 0.2 < sum(row.reading is None for row in rows) / len(rows) < 0.5
    assert {len(row.options or {}) for row in ROWS} >= {0, 2, 3, 4, 5, 6, 10}
    assert all(row.reading is None or row.reading in (row.options or "ABCDEFGHIJ") for row in ROWS)


def test_outcomes_are_counted_against_human_readings():
    rows = [Row("tuned", None, "", reading) for reading in ("A", "A", "B", None, None)]
    assert count_outcomes(rows, "A-AB-") == Counts(read=1, unread=1, misread=2)
    assert count_outcomes(rows, "A-AB-", "held-out") == Counts(0, 0, 0)


@pytest.mark.parametrize("part", ["tuned", "held-out", None])
@pytest.mark.parametrize("other", OTHERS)
def test_dsreason_parser_reads_more_and_misreads_less(other, part, own):
    we, they = count_outcomes(ROWS, own, part), count_outcomes(ROWS, OTHERS[other], part)
    assert we.read > they.read
    assert we.misread < they.misread


def test_misread_and_unread_rates_stay_below_limits(own):
    for part in ("tuned", "held-out"):
        result, size = count_outcomes(ROWS, own, part), sum(row.part == part for row in ROWS)
        assert result.misread <= 0.01 * size
        assert result.unread <= 0.05 * size


def test_docs_table_is_up_to_date(own):
    displayed = format_table(ROWS, {OURS: own} | OTHERS)
    print(displayed)
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert f"<!-- readings: begin -->\n{displayed}\n<!-- readings: end -->" in page
