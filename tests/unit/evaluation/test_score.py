"""Scores of a run, compared with hand-computed values and with cosmos-reason1's number of right answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsreason.evaluation.report.calculate_accuracy import calculate_accuracy
from dsreason.evaluation.report.score import (
    Mean,
    Proportion,
    compute_clustered_interval,
    compute_proportion,
    judge_result,
    score,
)
from tests.unit.evaluation.made_results import made

WRONG, UNPARSED = {"answer": "B"}, {"answer": ""}
UNANSWERED = {"answer": "", "error": "no such file", "rule": "none", "finish_reason": ""}


def several(*changes: dict[str, Any]) -> list[Any]:
    return [made(str(number), **change) for number, change in enumerate(changes)]


# ---------------------------------------------------------------- accuracy


def test_interval_matches_wilsons_formula() -> None:
    result = compute_proportion(7, 10)
    assert (result.count, result.total, result.share) == (7, 10, 0.7)
    assert result.interval == pytest.approx(
        (0.3967781, 0.8922087), abs=1e-6
    )  # (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)


def test_proportion_of_zero_results_is_undefined() -> None:
    assert compute_proportion(0, 0) == Proportion(0, 0, None, None)


def test_unanswered_question_lowers_only_overall_accuracy() -> None:
    accuracy = score(several({}, {}, WRONG, UNPARSED, UNANSWERED)).accuracy
    assert (accuracy.over_all.count, accuracy.over_all.total) == (2, 5)
    assert (accuracy.over_answered.count, accuracy.over_answered.total) == (2, 4)


def test_result_with_error_never_counts_as_correct() -> None:
    assert score(several({}, UNANSWERED | {"is_correct": True})).accuracy.over_all.count == 1


def test_accuracies_are_grouped_by_set_and_kind() -> None:
    summary = score(
        [
            made("1"),
            made("2", answer="B"),
            made("1", datasource="av", kind="open", answer="left", correct_answer="left"),
        ]
    )
    assert {name: part.over_all.share for name, part in summary.datasets.items()} == {"av": 1.0, "robovqa": 0.5}
    assert {name: part.over_all.total for name, part in summary.kinds.items()} == {"multiple_choice": 2, "open": 1}


def test_clips_are_counted_by_media_or_row() -> None:
    results = [made("1", media=["a.mp4"]), made("2", media=["a.mp4"]), made("3"), made("3", 1), made("4")]
    assert score(results).accuracy.clips == 3


def test_clustered_interval_follows_spread_between_clips() -> None:
    # mean 1/2, residuals per clip 1, -1, 0: error √(3/2 · 2) / 6; t quantile with 2 degrees of freedom 4.302653
    result = compute_clustered_interval([1, 1, 0, 0, 1, 0], list("aabbcc"), bounds=(-9, 9))
    assert result == pytest.approx((0.5 - 4.302653 * 3**0.5 / 6, 0.5 + 4.302653 * 3**0.5 / 6), abs=1e-6)


def test_clustered_interval_stays_between_0_and_1() -> None:
    assert compute_clustered_interval([1, 1, 0, 0], list("aabb"), bounds=(0, 1)) == (0, 1)


@pytest.mark.parametrize(("values", "clips"), [([1, 0], "aa"), ([1, 1, 1], "abc"), ([1, 0, 1, 0], "aabb")])
def test_clustered_interval_requires_spread_between_clips(values: list[float], clips: str) -> None:
    assert compute_clustered_interval(values, clips, bounds=(0, 1)) is None


# ---------------------------------------------------------------- how it was answered


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, "right"), (WRONG, "wrong"), (UNPARSED, "unparsed"), (UNANSWERED, "unanswered")],
)
def test_every_result_has_one_verdict(changes: dict[str, Any], expected: str) -> None:
    assert judge_result(made(**changes)) == expected


def test_unparsed_and_truncated_are_shares_of_answers() -> None:
    summary = score(several({}, UNPARSED, {"finish_reason": "length"}, UNANSWERED))
    assert (summary.unparsed.count, summary.unparsed.total) == (1, 3)
    assert (summary.truncated.count, summary.truncated.total) == (1, 3)


def test_accuracy_is_reported_per_parser_rule() -> None:
    summary = score(several({}, {}, WRONG, {"rule": "letter and text"}, UNPARSED, UNANSWERED))
    result = {rule: (part.count, part.total) for rule, part in summary.rules.items()}
    assert result == {"letter": (2, 3), "letter and text": (1, 1), "none": (0, 1)}


def test_unanswered_questions_are_listed_with_reason() -> None:
    assert score(several({}, UNANSWERED)).unanswered == {"robovqa/1/0": "no such file"}


def test_letters_are_counted_by_reference_and_answer() -> None:
    b = {"correct_answer": "B"}
    letters = score(several({}, {}, {"answer": "b"}, UNPARSED, b | {"answer": "A"}, b | UNANSWERED)).letters
    assert letters is not None
    assert letters.confusion == {"A": {"A": 2, "B": 1, "none": 1}, "B": {"A": 1, "B": 0, "none": 1}}
    assert {letter: part.share for letter, part in letters.references.items()} == {"A": 4 / 6, "B": 2 / 6}
    assert {letter: part.share for letter, part in letters.answers.items()} == {"A": 3 / 4, "B": 1 / 4}


def test_long_choice_answer_counts_as_other() -> None:
    letters = score(several({"answer": "to the left"}, {})).letters
    assert letters is not None
    assert letters.confusion == {"A": {"A": 1, "other": 1}}
    assert letters.answers["A"].total == 1


def test_letters_are_counted_only_for_multiple_choice() -> None:
    assert score(several({"kind": "open"})).letters is None


# ---------------------------------------------------------------- scores


def test_scores_are_averaged_over_available_results() -> None:
    results = several(
        {"scores": {"bleu": 10, "mine": 1}}, {"scores": {"bleu": 30}}, {}, UNANSWERED | {"scores": {"bleu": 0}}
    )
    assert score(results).scores == {"bleu": Mean(20.0, 2), "mine": Mean(1.0, 1)}


def test_nan_score_leaves_mean_undefined() -> None:
    assert score(several({"scores": {"mine": float("nan")}})).scores == {"mine": Mean(None, 1)}


def test_corpus_bleu_uses_answered_free_texts() -> None:
    text = {"kind": "free_text", "answer": "the ball rolls to the left", "correct_answer": "the ball rolls to the left"}
    assert score(several(text, text, UNANSWERED | {"kind": "free_text"}, {})).corpus_bleu == Mean(
        pytest.approx(100.0), 2
    )
    assert score(several({})).corpus_bleu is None


def ordinal(*pairs: tuple[str, str]) -> list[Any]:
    return several(*({"kind": "ordinal", "answer": answer, "correct_answer": right} for answer, right in pairs))


def test_pearson_uses_only_numeric_answers() -> None:
    # deviations (-1, 0, 1) and (-4, -1, 5) / 3: r = 3 / √(2 · 42 / 9)
    pearson = score(ordinal(("1", "1"), ("2", "2"), ("3.0", "4"), ("many", "5"), ("", "1"), ("inf", "2"))).pearson
    assert pearson == Mean(pytest.approx(3 / (2 * 42 / 9) ** 0.5), 3)


@pytest.mark.parametrize("pairs", [[("x", "1")], [("1", "1")], [("2", "1"), ("2", "3")], [("1", "3"), ("2", "3")]])
def test_undefined_pearson_correlation_has_no_value(pairs: list[tuple[str, str]]) -> None:
    pearson = score(ordinal(*pairs)).pearson
    assert pearson is not None
    assert pearson.value is None


def test_score_summary_is_plain_json(tmp_path: Path) -> None:
    results = several({}, WRONG, UNANSWERED, {"scores": {"x": 1.5}})
    document = json.loads(json.dumps(asdict(score(results, run="m/letter")), allow_nan=False))
    assert document["run"] == "m/letter"
    assert document["accuracy"]["over_all"]["count"] == 2
    assert document["letters"]["confusion"]["A"] == {"A": 2, "B": 1, "none": 1}


# ---------------------------------------------------------------- calculate_accuracy.py

TRUE, FALSE = {"is_correct": True}, {"is_correct": False}


@pytest.mark.parametrize(
    ("files", "samples", "correct", "accuracy"),
    [
        ({"1.json": [TRUE, FALSE, {"answer": "A"}, 5], "sub/2.json": [TRUE, TRUE]}, 4, 3, "0.7500 (75.00%)"),
        ({"1.json": [TRUE], "2.json": "[{"}, 1, 1, "1.0000 (100.00%)"),
        ({"1.json": []}, 0, 0, "0.0000 (0.00%)"),
        ({"1.json": [{"is_correct": "false"}, {"is_correct": 0}, {"is_correct": None}]}, 3, 1, "0.3333 (33.33%)"),
        ({"1.json": {"is_correct": True}, "2.json": [FALSE]}, 1, 0, "0.0000 (0.00%)"),
    ],
)
def test_compat_accuracy_matches_cosmos_reason1(
    tmp_path: Path, files: dict[str, Any], samples: int, correct: int, accuracy: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert list(calculate_accuracy(tmp_path).lines()) == [
        f"Total samples processed across all files: {samples}",
        f"Total samples counted as correct: {correct}",
        f"Mean accuracy: {accuracy}",
    ]


def test_compat_reports_only_foreign_skipped_files(tmp_path: Path) -> None:
    for name, content in {"a.json": "[{", "b.json": "{}", "run.json": "{}", "summary.json": "{}"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "c.json").write_bytes(b"\xff")
    accuracy = calculate_accuracy(tmp_path)
    assert accuracy.files == 5
    assert [text.split(" ")[0] for text in accuracy.complaints] == ["Error:", "Warning:", "Error:"]
    assert [name in text for name, text in zip("abc", accuracy.complaints, strict=True)] == [True, True, True]


def test_compat_finds_no_files_in_empty_folder(tmp_path: Path) -> None:
    assert calculate_accuracy(tmp_path).files == 0
    assert calculate_accuracy(tmp_path / "absent").files == 0


def test_compat_counts_only_requested_data_sets(tmp_path: Path) -> None:
    for dataset in ("av", "agibot", "robovqa"):
        (tmp_path / "m" / dataset).mkdir(parents=True)
        (tmp_path / "m" / dataset / "1.json").write_text(json.dumps([TRUE]))
    assert calculate_accuracy(tmp_path, ["av", "robovqa"]).samples == 2
    assert calculate_accuracy(tmp_path, ["none"]).files == 0
