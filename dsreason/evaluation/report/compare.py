"""Question-by-question comparison of two runs on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from dsreason.errors import DataError
from dsreason.evaluation.report.score import (
    Interval,
    Proportion,
    compute_clustered_interval,
    compute_proportion,
    compute_wilson_interval,
    get_clip_key,
    is_right,
)
from dsreason.evaluation.types import Result

Pair = tuple[Result, Result]


@dataclass(frozen=True)
class Paired:
    """A comparison over the questions that both runs have. Questions without an answer count as wrong."""

    both_right: int
    only_this_right: int
    only_baseline_right: int
    both_wrong: int
    this: Proportion
    baseline: Proportion
    """Proportion of correct answers in the baseline; `this` is the proportion in this run."""
    difference: float
    """Accuracy of this run minus that of the baseline."""
    interval: Interval
    """95 % confidence interval for the difference; see `compute_newcombe_interval`."""
    clustered: Interval | None
    """95 % confidence interval for the difference, clustered by clip because questions about the same clip are correlated; None
    if undefined."""
    p_value: float
    """Two-sided p-value from McNemar's exact test: the probability that chance alone would split the changed answers at least
    this unevenly."""


@dataclass(frozen=True)
class RunComparison:
    this: str
    baseline: str
    """Name of the baseline, `<model>/<answer_type>`; `this` is the name of this run."""
    overall: Paired
    datasets: dict[str, Paired]
    only_in_this: int
    only_in_baseline: int
    """Number of questions that only the baseline has. They are not compared, and neither are those that only this run has
    (`only_in_this`)."""
    gained: tuple[str, ...]
    """Ids of questions that only this run answers correctly."""
    lost: tuple[str, ...]
    """Ids of questions that only the baseline answers correctly."""

    @property
    def warning(self) -> str | None:
        """A message if the runs have different questions, else None."""
        if not self.only_in_this and not self.only_in_baseline:
            return None
        common = self.overall.this.total
        return (
            f"the runs have different questions: {self.only_in_this} are only in {self.this}, and {self.only_in_baseline} "
            f"are only in {self.baseline}; only the {common} common ones are compared, so the accuracies differ from those "
            "of the complete runs"
        )


def compare(this: Sequence[Result], baseline: Sequence[Result], names: tuple[str, str]) -> RunComparison:
    """Compare two runs, pairing their results by data set and question id.

    Args:
        names: names of this run and of the baseline.

    Raises:
        DataError: the runs have no question in common, or a common question has different reference answers.
    """
    before = {(result.datasource, result.id): result for result in baseline}
    pairs = [(result, before[key]) for result in this if (key := (result.datasource, result.id)) in before]
    if not pairs:
        raise DataError(
            f"{names[0]} ({len(this)} questions, such as {this[0].id!r}) and {names[1]} ({len(baseline)} questions, such "
            f"as {baseline[0].id!r}) have no question in common; compare runs on the same data"
        )
    for a, b in pairs:
        if a.correct_answer != b.correct_answer:
            raise DataError(
                f"question {a.id!r}: the reference answer is {a.correct_answer!r:.80} in {names[0]}, but "
                f"{b.correct_answer!r:.80} in {names[1]}; compare runs on the same data"
            )
    datasets = sorted({a.datasource for a, _ in pairs})
    return RunComparison(
        *names,
        overall=_compare(pairs),
        datasets={name: _compare([pair for pair in pairs if pair[0].datasource == name]) for name in datasets},
        only_in_this=len(this) - len(pairs),
        only_in_baseline=len(baseline) - len(pairs),
        gained=tuple(a.id for a, b in pairs if is_right(a) and not is_right(b)),
        lost=tuple(a.id for a, b in pairs if is_right(b) and not is_right(a)),
    )


def _compare(pairs: Sequence[Pair]) -> Paired:
    outcomes = [(is_right(a), is_right(b)) for a, b in pairs]
    both, gained, lost, neither = (outcomes.count((a, b)) for a in (True, False) for b in (True, False))
    return Paired(
        both_right=both,
        only_this_right=gained,
        only_baseline_right=lost,
        both_wrong=neither,
        this=compute_proportion(both + gained, len(pairs)),
        baseline=compute_proportion(both + lost, len(pairs)),
        difference=(gained - lost) / len(pairs),
        interval=compute_newcombe_interval(both, gained, lost, neither),
        clustered=compute_clustered_interval(
            [a - b for a, b in outcomes], [get_clip_key(a) for a, _ in pairs], bounds=(-1.0, 1.0)
        ),
        p_value=compute_mcnemar(gained, lost),
    )


def compute_mcnemar(gained: int, lost: int) -> float:
    """Compute the two-sided p-value from McNemar's exact test.

    Under the null hypothesis, each changed answer is equally likely to be correct in either run.
    """
    return float(binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0


def compute_newcombe_interval(both: int, gained: int, lost: int, neither: int) -> Interval:
    """Compute the 95 % confidence interval for the difference between two paired proportions, (gained - lost) / n.

    Source: method 10 in Newcombe, "Improved confidence intervals for the difference between binomial proportions based on
    paired data", Statistics in Medicine 17 (1998) 2635-2650. It combines the two Wilson intervals and accounts for the
    correlation between the proportions.
    """
    n = both + gained + lost + neither
    p1, p2 = (both + gained) / n, (both + lost) / n
    (low1, high1), (low2, high2) = compute_wilson_interval(both + gained, n), compute_wilson_interval(both + lost, n)
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    product = both * neither - gained * lost
    corrected = max(product - n / 2, 0) if product > 0 else product
    phi = corrected / math.sqrt(margins) if margins else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a**2 - 2 * phi * a * b + b**2))

    return p1 - p2 - reach(p1 - low1, high2 - p2), p1 - p2 + reach(high1 - p1, p2 - low2)
