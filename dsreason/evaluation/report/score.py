"""Scoring of evaluation results: accuracies with confidence intervals, and other statistics on a model's answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import sacrebleu
from scipy.stats import binomtest, pearsonr
from scipy.stats import t as student_t

from dsreason.evaluation.types import Result

CONFIDENCE = 0.95
NO_LETTER, NOT_A_LETTER = "none", "other"

Interval = tuple[float, float]
Verdict = Literal["right", "wrong", "unparsed", "unanswered"]


@dataclass(frozen=True)
class Proportion:
    """A proportion, `count` of `total`. `share` and its 95 % Wilson interval are None if `total` is 0."""

    count: int
    total: int
    share: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Accuracy:
    over_all: Proportion
    """Accuracy over all questions; questions without an answer count as wrong."""
    over_answered: Proportion
    clips: int
    """Number of distinct clips (for text-only questions, rows) that the questions are about."""
    clustered: Interval | None
    """95 % confidence interval for `over_all`, clustered by clip because questions about the same clip are correlated; None if
    undefined. See `compute_clustered_interval`."""


@dataclass(frozen=True)
class Letters:
    """Letters in multiple-choice answers. A letter answered far more often than it is correct indicates a position bias."""

    confusion: dict[str, dict[str, int]]
    """Reference letter → answered letter → count; "none" stands for unparsed and missing answers."""
    references: dict[str, Proportion]
    """Letter → proportion of questions for which this letter is correct."""
    answers: dict[str, Proportion]
    """Letter → proportion of answers that give this letter."""


@dataclass(frozen=True)
class Mean:
    """A mean or another statistic, with the number of values that it is based on; `value` is None if it is undefined."""

    value: float | None
    n: int


@dataclass(frozen=True)
class RunSummary:
    """The content of `summary.json`."""

    run: str
    """Name of the run, `<model>/<answer_type>`, taken from the folder names."""
    accuracy: Accuracy
    datasets: dict[str, Accuracy]
    kinds: dict[str, Accuracy]
    """Accuracy per question kind: `multiple_choice`, `yes_no`, `open`, `free_text`, `ordinal`."""
    unparsed: Proportion
    """Proportion of answers that could not be parsed."""
    truncated: Proportion
    """Proportion of answers that were cut off at the token limit."""
    rules: dict[str, Proportion]
    """Parser rule → accuracy of the answers that matched it."""
    letters: Letters | None
    """Statistics on multiple-choice answers; None if there are no multiple-choice questions."""
    scores: dict[str, Mean]
    """Name of a score (`bleu`, `rougeL`, `similarity`, a user's scorer) → its mean over the answers."""
    corpus_bleu: Mean | None
    """sacrebleu's corpus BLEU over all free texts, from 0 to 100; None if there are no free texts."""
    pearson: Mean | None
    """Pearson's r between numeric answers to ordinal questions and their references; None if there are no such answers."""
    unanswered: dict[str, str]
    """Question id → reason why there is no answer."""
    graded_by: dict[str, int]
    """Rule that determined correctness (`kind`, or a scorer, such as `helpful >= 0.5`) → number of answers."""
    left_out: tuple[str, ...] = ()
    """Data sets in the run that were not requested."""


def score(results: Sequence[Result], *, run: str = "", left_out: tuple[str, ...] = ()) -> RunSummary:
    """Compute a run's summary from its results, of which there must be at least one."""
    answered = [result for result in results if result.error is None]
    free_text = [result for result in answered if result.kind == "free_text"]
    return RunSummary(
        run=run,
        accuracy=compute_accuracy(results),
        datasets={
            name: compute_accuracy(part)
            for name, part in group_results(results, lambda result: result.datasource).items()
        },
        kinds={
            name: compute_accuracy(part) for name, part in group_results(results, lambda result: result.kind).items()
        },
        unparsed=compute_proportion(sum(result.answer == "" for result in answered), len(answered)),
        truncated=compute_proportion(sum(result.finish_reason == "length" for result in answered), len(answered)),
        rules={
            rule: compute_proportion(sum(map(is_right, part)), len(part))
            for rule, part in group_results(answered, lambda result: result.rule).items()
        },
        letters=count_letters([result for result in results if result.kind == "multiple_choice"]),
        scores=average_scores(answered),
        corpus_bleu=compute_corpus_bleu(free_text) if free_text else None,
        pearson=compute_pearson([result for result in answered if result.kind == "ordinal"]),
        unanswered={result.id: result.error for result in results if result.error is not None},
        graded_by={name: len(part) for name, part in group_results(answered, lambda result: result.graded_by).items()},
        left_out=left_out,
    )


def is_right(result: Result) -> bool:
    """Return whether the answer is correct; a missing answer never is."""
    return result.is_correct and result.error is None


def judge_result(result: Result) -> Verdict:
    """Return the verdict on an answer: `unparsed` means that it could not be parsed, `unanswered` that there is none."""
    if result.error is not None:
        return "unanswered"
    if result.is_correct:
        return "right"
    return "wrong" if result.answer else "unparsed"


def group_results(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Group the results by `key`; the groups are sorted by key."""
    return {name: list(part) for name, part in groupby(sorted(results, key=key), key)}


# ---------------------------------------------------------------- accuracy


def compute_accuracy(results: Sequence[Result]) -> Accuracy:
    right = [is_right(result) for result in results]
    clips = [get_clip_key(result) for result in results]
    answered = sum(result.error is None for result in results)
    return Accuracy(
        over_all=compute_proportion(sum(right), len(right)),
        over_answered=compute_proportion(sum(right), answered),
        clips=len(set(clips)),
        clustered=compute_clustered_interval(right, clips, bounds=(0.0, 1.0)),
    )


def get_clip_key(result: Result) -> tuple[str, ...]:
    """Return a key that identifies the clip that a question is about: its media or, for text-only questions, its row."""
    return tuple(result.media) or (result.datasource, result.video_id)


def compute_proportion(count: int, total: int) -> Proportion:
    if total == 0:
        return Proportion(count, total, None, None)
    return Proportion(count, total, count / total, compute_wilson_interval(count, total))


def compute_wilson_interval(count: int, total: int) -> Interval:
    """Compute the 95 % Wilson confidence interval for a proportion."""
    low, high = binomtest(count, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(low), float(high)


def compute_clustered_interval(
    values: Sequence[float], clusters: Sequence[object], *, bounds: Interval
) -> Interval | None:
    """Compute the 95 % confidence interval for the mean of values that are correlated within clusters.

    It uses a t distribution and cluster-robust standard errors, with the usual factor C / (C - 1) for C clusters. Source:
    Miller, "Adding Error Bars to Evals" (arXiv:2411.00640).

    Args:
        bounds: minimum and maximum possible mean.

    Returns:
        The interval; None if it is undefined, because there is a single cluster or no variance between clusters.
    """
    mean = sum(values) / len(values)
    residuals: dict[object, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] = residuals.get(cluster, 0.0) + value - mean
    count, squares = len(residuals), sum(residual**2 for residual in residuals.values())
    if count < 2 or squares < 1e-12:
        return None
    error = math.sqrt(count / (count - 1) * squares) / len(values)
    reach = float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return max(bounds[0], mean - reach), min(bounds[1], mean + reach)


# ---------------------------------------------------------------- kinds of questions


def count_letters(results: Sequence[Result]) -> Letters | None:
    if not results:
        return None
    pairs = Counter((_read_letter(result.correct_answer), _read_letter(result.answer)) for result in results)
    rows = sorted({reference for reference, _ in pairs}, key=_sort_letters_first)
    columns = sorted({letter for pair in pairs for letter in pair}, key=_sort_letters_first)
    single_columns = [column for column in columns if len(column) == 1]
    read = sum(count for (_, answer), count in pairs.items() if answer in single_columns)
    return Letters(
        confusion={row: {column: pairs[row, column] for column in columns} for row in rows},
        references={
            row: compute_proportion(sum(pairs[row, column] for column in columns), len(results)) for row in rows
        },
        answers={
            column: compute_proportion(sum(pairs[row, column] for row in rows), read) for column in single_columns
        },
    )


def _read_letter(text: str) -> str:
    text = text.strip().upper()
    return text if len(text) == 1 else NOT_A_LETTER if text else NO_LETTER


def _sort_letters_first(letter: str) -> tuple[int, str]:
    return (len(letter) > 1) + (letter == NO_LETTER), letter


def average_scores(results: Sequence[Result]) -> dict[str, Mean]:
    """Average each score over the results that have that score."""
    names = sorted({name for result in results for name in result.scores})
    values = {name: [result.scores[name] for result in results if name in result.scores] for name in names}
    return {name: Mean(_to_finite(sum(scores) / len(scores)), len(scores)) for name, scores in values.items()}


def compute_corpus_bleu(results: Sequence[Result]) -> Mean:
    answers, references = [r.answer for r in results], [r.correct_answer for r in results]
    return Mean(sacrebleu.corpus_bleu(answers, [references]).score, len(results))


def compute_pearson(results: Sequence[Result]) -> Mean | None:
    """Compute Pearson's r between answers and references; return None if there are no results.

    Its value is None if there are fewer than two pairs of numbers, or if all answers or all references are equal.
    """
    if not results:
        return None
    pairs = [(_parse_number(result.answer), _parse_number(result.correct_answer)) for result in results]
    pairs = [pair for pair in pairs if None not in pair]
    if any(len(set(side)) < 2 for side in zip(*pairs, strict=True)) or not pairs:
        return Mean(None, len(pairs))
    return Mean(_to_finite(pearsonr(*zip(*pairs, strict=True)).statistic), len(pairs))


def _parse_number(text: str) -> float | None:
    try:
        return _to_finite(float(text))
    except ValueError:
        return None


def _to_finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
