"""Scores of results: accuracies with their intervals, and other numbers about how a model answered."""

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
    """`count` of `total`. `share` and its 95 % interval (Wilson's) are None of nothing."""

    count: int
    total: int
    share: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Accuracy:
    over_all: Proportion
    """Accuracy of all questions; those without an answer count as wrong."""
    over_answered: Proportion
    clips: int
    """Number of different media (or rows, of questions about text) that the questions are about."""
    clustered: Interval | None
    """95 % interval of `over_all` that allows for questions about one clip being alike; see `compute_clustered_interval`."""


@dataclass(frozen=True)
class Letters:
    """Multiple choice. A letter that is answered far more often than it is right is a position bias."""

    confusion: dict[str, dict[str, int]]
    """Reference letter → answered letter → count; "none" where no letter was read or nothing was answered."""
    references: dict[str, Proportion]
    """Number of questions by the letter that is right."""
    answers: dict[str, Proportion]
    """Number of answers by the letter that was read in them."""


@dataclass(frozen=True)
class Mean:
    """`value` is None if it is not defined."""

    value: float | None
    n: int


@dataclass(frozen=True)
class RunSummary:
    """Content of `summary.json`; each part as its class describes."""

    run: str
    """`<model>/<answer_type>`, from the names of the folders."""
    accuracy: Accuracy
    datasets: dict[str, Accuracy]
    kinds: dict[str, Accuracy]
    """Accuracy by question kind: `multiple_choice`, `yes_no`, `open`, `free_text`, `ordinal`."""
    unparsed: Proportion
    """Answers in which nothing was read, of the answers."""
    truncated: Proportion
    """Answers that ended at the token limit, of the answers."""
    rules: dict[str, Proportion]
    """Accuracy of the answers by the parser's rule that read them."""
    letters: Letters | None
    """None without multiple-choice questions."""
    scores: dict[str, Mean]
    """Means of the scores of answers: `bleu`, `rougeL`, `similarity`, and a user's own."""
    corpus_bleu: Mean | None
    """sacrebleu's, 0 to 100, over all free texts together; None without free texts."""
    pearson: Mean | None
    """Pearson's r of the ordinal answers that are numbers with their references; None without ordinal questions."""
    unanswered: dict[str, str]
    """Question id → the reason why it has no answer."""
    graded_by: dict[str, int]
    """Rule that decided which answers are right → number of answers: `kind`, or a scorer, as in `helpful >= 0.5`."""
    left_out: tuple[str, ...] = ()
    """Data sets of the run that were not asked for."""


def score(results: Sequence[Result], *, run: str = "", left_out: tuple[str, ...] = ()) -> RunSummary:
    """The numbers of a run, from at least one result."""
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
        unparsed=share(sum(result.answer == "" for result in answered), len(answered)),
        truncated=share(sum(result.finish_reason == "length" for result in answered), len(answered)),
        rules={
            rule: share(sum(map(is_right, part)), len(part))
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
    """Right over all questions: what has no answer is wrong."""
    return result.is_correct and result.error is None


def judge_result(result: Result) -> Verdict:
    """Return the verdict; `unparsed`: nothing was read in the answer; `unanswered`: the answer is missing."""
    if result.error is not None:
        return "unanswered"
    if result.is_correct:
        return "right"
    return "wrong" if result.answer else "unparsed"


def group_results(results: Iterable[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Group the results by key, in the keys' order."""
    return {name: list(part) for name, part in groupby(sorted(results, key=key), key)}


# ---------------------------------------------------------------- accuracy


def compute_accuracy(results: Sequence[Result]) -> Accuracy:
    right = [is_right(result) for result in results]
    clips = [clip_of(result) for result in results]
    answered = sum(result.error is None for result in results)
    return Accuracy(
        over_all=share(sum(right), len(right)),
        over_answered=share(sum(right), answered),
        clips=len(set(clips)),
        clustered=compute_clustered_interval(right, clips, bounds=(0.0, 1.0)),
    )


def clip_of(result: Result) -> tuple[str, ...]:
    """Return what tells the clip of a question: its media, or without any the row."""
    return tuple(result.media) or (result.datasource, result.video_id)


def share(count: int, total: int) -> Proportion:
    if total == 0:
        return Proportion(count, total, None, None)
    return Proportion(count, total, count / total, compute_wilson_interval(count, total))


def compute_wilson_interval(count: int, total: int) -> Interval:
    """95 % interval of a proportion."""
    low, high = binomtest(count, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(low), float(high)


def compute_clustered_interval(
    values: Sequence[float], clusters: Sequence[object], *, bounds: Interval
) -> Interval | None:
    """95 % interval of the mean of values that are alike within a cluster: t distribution, cluster-robust error.

    `bounds` are the lowest and the highest possible mean. Source: Miller, "Adding Error Bars to Evals"
    (arXiv:2411.00640), clustered standard errors, with the usual factor C / (C - 1) for C clusters.
    None if it is not defined: a single cluster, or no spread between clusters.
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
        references={row: share(sum(pairs[row, column] for column in columns), len(results)) for row in rows},
        answers={column: share(sum(pairs[row, column] for row in rows), read) for column in single_columns},
    )


def _read_letter(text: str) -> str:
    text = text.strip().upper()
    return text if len(text) == 1 else NOT_A_LETTER if text else NO_LETTER


def _sort_letters_first(letter: str) -> tuple[int, str]:
    return (len(letter) > 1) + (letter == NO_LETTER), letter


def average_scores(results: Sequence[Result]) -> dict[str, Mean]:
    """Average each score over the results that have it."""
    names = sorted({name for result in results for name in result.scores})
    values = {name: [result.scores[name] for result in results if name in result.scores] for name in names}
    return {name: Mean(_to_finite(sum(scores) / len(scores)), len(scores)) for name, scores in values.items()}


def compute_corpus_bleu(results: Sequence[Result]) -> Mean:
    answers, references = [r.answer for r in results], [r.correct_answer for r in results]
    return Mean(sacrebleu.corpus_bleu(answers, [references]).score, len(results))


def compute_pearson(results: Sequence[Result]) -> Mean | None:
    """Return Pearson's r, None without pairs. r is not defined for fewer than two pairs, nor if either side is constant."""
    if not results:
        return None
    pairs = [(_number(result.answer), _number(result.correct_answer)) for result in results]
    pairs = [pair for pair in pairs if None not in pair]
    if any(len(set(side)) < 2 for side in zip(*pairs, strict=True)) or not pairs:
        return Mean(None, len(pairs))
    return Mean(_to_finite(pearsonr(*zip(*pairs, strict=True)).statistic), len(pairs))


def _number(text: str) -> float | None:
    try:
        return _to_finite(float(text))
    except ValueError:
        return None


def _to_finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
