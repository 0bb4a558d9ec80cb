"""The comparison of two runs, question by question."""

from __future__ import annotations

import pytest

from dsreason.errors import DataError
from dsreason.evaluation.report.compare import compare, compute_mcnemar, compute_newcombe_interval
from dsreason.evaluation.types import Result
from tests.unit.evaluation.made_results import made

NAMES = ("new", "old")


def answers(letters: str, **changes: str) -> list[Result]:
    """Make a result for each letter; "A" is always the right answer."""
    return [made(str(number), answer=letter, **changes) for number, letter in enumerate(letters)]


def test_results_are_paired_by_their_question() -> None:
    result = compare(answers("AAABB"), list(reversed(answers("ABBAB"))), NAMES)
    overall = result.overall
    assert (overall.both_right, overall.only_this_right, overall.only_baseline_right, overall.both_wrong) == (
        1,
        2,
        1,
        1,
    )
    assert (overall.this.count, overall.baseline.count, overall.this.total) == (3, 2, 5)
    assert overall.difference == pytest.approx(0.2)
    assert (result.gained, result.lost) == (("robovqa/1/0", "robovqa/2/0"), ("robovqa/3/0",))
    assert result.warning is None


def test_unanswered_question_counts_as_wrong() -> None:
    result = compare([made(error="gone")], [made()], NAMES)
    assert result.lost == ("robovqa/v/0",)


def test_each_dataset_is_also_compared_separately() -> None:
    new = answers("AA") + answers("BB", datasource="av")
    old = answers("BB") + answers("AA", datasource="av")
    result = compare(new, old, NAMES)
    assert {name: part.difference for name, part in result.datasets.items()} == {"av": -1.0, "robovqa": 1.0}
    assert result.overall.difference == 0.0


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(5, 1, 2 * (1 + 6) / 64), (1, 5, 2 * (1 + 6) / 64), (3, 3, 1.0), (0, 0, 1.0), (10, 0, 2 / 1024)],
)
def test_mcnemars_test_is_exact(gained: int, lost: int, p: float) -> None:
    assert compute_mcnemar(gained, lost) == pytest.approx(p)


def test_difference_interval_matches_newcombes_formula() -> None:
    # Fagerland, Lydersen, Laake, BMC Med Res Methodol 14 (2014): (1, 1, 7, 12), difference -0.286, -0.507 to -0.026.
    assert compute_newcombe_interval(1, 1, 7, 12) == pytest.approx((-0.507, -0.026), abs=5e-4)


def test_swapping_runs_mirrors_the_interval() -> None:
    low, high = compute_newcombe_interval(20, 12, 2, 16)
    assert compute_newcombe_interval(20, 2, 12, 16) == pytest.approx((-high, -low))
    assert low > 0


@pytest.mark.parametrize("counts", [(5, 0, 0, 0), (0, 0, 0, 5), (0, 5, 0, 0), (1, 0, 0, 0), (3, 2, 0, 0)])
def test_interval_contains_difference_at_extreme_counts(counts: tuple[int, int, int, int]) -> None:
    low, high = compute_newcombe_interval(*counts)
    assert -1 <= low <= (counts[1] - counts[2]) / sum(counts) <= high <= 1


def test_clustered_interval_uses_paired_differences() -> None:
    # differences 1, 1 in clip a, -1, 0 in b, 0, 1 in c: mean 1/3, residuals 4/3, -5/3, 1/3
    clips = ["a", "a", "b", "b", "c", "c"]
    new = [
        made(str(i), answer=letter, media=[clip]) for i, (letter, clip) in enumerate(zip("AABAAA", clips, strict=True))
    ]
    old = [made(str(i), answer=letter) for i, letter in enumerate("BBAAAB")]
    reach = 4.302653 * (1.5 * (16 + 25 + 1) / 9) ** 0.5 / 6
    assert compare(new, old, NAMES).overall.clustered == pytest.approx((max(-1, 1 / 3 - reach), 1.0))


def test_only_common_questions_are_compared_with_warning() -> None:
    result = compare(answers("AAA"), answers("BA") + answers("AAAA", datasource="av"), NAMES)
    assert (result.overall.this.total, result.only_in_this, result.only_in_baseline) == (2, 1, 4)
    assert result.warning is not None
    assert "1 are only in new, and 4 are only in old; only the 2 common ones are compared" in result.warning


def test_runs_without_common_questions_are_rejected() -> None:
    with pytest.raises(
        DataError, match=r"new \(1 questions, .*\) and old \(1 questions, .*\) have no question in common"
    ):
        compare(answers("A"), answers("A", datasource="av"), NAMES)


def test_different_reference_answers_are_rejected() -> None:
    with pytest.raises(DataError, match="question 'robovqa/0/0': the reference answer is 'A' in new, but 'B' in old"):
        compare(answers("A"), answers("A", correct_answer="B"), NAMES)
