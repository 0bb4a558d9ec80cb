"""Numbers as people read them: texts for reports, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dsreason.evaluation.report.compare import Comparison, Paired
from dsreason.evaluation.report.score import Accuracy, Interval, Mean, Share, Summary
from dsreason.evaluation.types import KIND

NOTHING = "–"
ACCURACY_COLUMNS = ("accuracy", "95% interval", "right", "questions", "clips", "of answered", "answered")


def percent(value: float | None) -> str:
    """`72.3%`."""
    return NOTHING if value is None else f"{value:.1%}"


def between(interval: Interval | None) -> str:
    """`66.1–77.8%`."""
    return NOTHING if interval is None else f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}%"


def points(difference: float) -> str:
    """A difference of two shares, in percentage points: `+4.2`."""
    return f"{100 * difference:+.1f}"


def points_between(interval: Interval | None) -> str:
    """`-1.0 to +9.4`."""
    return NOTHING if interval is None else f"{points(interval[0])} to {points(interval[1])}"


def share_of(share: Share) -> str:
    """`12 of 200 (6.0%)`."""
    return f"{share.count} of {share.total} ({percent(share.share)})"


def mean_of(mean: Mean) -> str:
    """`0.4321 (n = 50)`."""
    value = NOTHING if mean.value is None else f"{mean.value:.4f}"
    return f"{value} (n = {mean.n})"


def p_of(p_value: float) -> str:
    return "< 0.0001" if p_value < 0.0001 else f"{p_value:.4f}"


def facts(summary: Summary) -> dict[str, str]:
    """Return what there is to say of a run beside its accuracies."""
    shares = {"unparsed answers": share_of(summary.unparsed), "truncated answers": share_of(summary.truncated)}
    if summary.unanswered:
        question, why = next(iter(summary.unanswered.items()))
        shares["without an answer"] = f"{len(summary.unanswered)}, such as {question}: {why:.200}"
    if summary.accuracy.clustered:
        shares["95% interval, clustered by clip"] = between(summary.accuracy.clustered)
    return shares | score_facts(summary)


def graded_note(summary: Summary, settings: Mapping[str, str]) -> str:
    """Return what a scorer decided, and by which threshold; or that it decided nothing. "" without a scorer.

    `settings` are those of `run.json`, nested names joined by dots.
    """
    deciding = {name: count for name, count in summary.graded_by.items() if name != KIND}
    if deciding:
        total = sum(summary.graded_by.values())
        by = ", ".join(f"{name} ({count} of {total} answers)" for name, count in deciding.items())
        return (
            f"An answer is right by evaluation.scorer and its evaluation.scorer_threshold, {by}, if anything was read."
        )
    scorer, threshold = settings.get("config.evaluation.scorer"), settings.get("config.evaluation.scorer_threshold")
    if scorer is None:
        return ""
    nothing = f"The scorer {scorer} has a mean, see the scores, and decides nothing: what is right goes by"
    if settings.get("config.evaluation.parser") == "compat":
        return f"{nothing} the letters only, as in cosmos-reason1 (evaluation.parser is compat)."
    if threshold is None:
        return f"{nothing} the questions' kinds, as evaluation.scorer_threshold is not set."
    return f"An answer is right by evaluation.scorer ({scorer}) from {threshold} on."  # results that do not say it themselves


def score_facts(summary: Summary) -> dict[str, str]:
    means = {f"mean {name}": mean_of(mean) for name, mean in summary.scores.items()}
    if summary.corpus_bleu:
        means["corpus BLEU"] = mean_of(summary.corpus_bleu)
    if summary.pearson:
        means["Pearson's r"] = mean_of(summary.pearson)
    return means


def accuracy_parts(summary: Summary) -> list[tuple[str, dict[str, Accuracy]]]:
    """Return what accuracies are shown for, in sections: data sets, question kinds if there are several, all."""
    parts = [("data set", summary.datasets)]
    if len(summary.kinds) > 1:
        parts.append(("kind", {f"{kind.replace('_', ' ')} questions": part for kind, part in summary.kinds.items()}))
    return [*parts, ("run", {"all": summary.accuracy})]


def accuracy_table(summary: Summary) -> Table:
    """One run, a row for each part."""
    table = _table(Text(summary.run), "", ACCURACY_COLUMNS)
    for _, parts in accuracy_parts(summary):
        for name, part in parts.items():
            table.add_row(Text(name), *_accuracy_cells(part))
        table.add_section()
    return table


def runs_table(summaries: Sequence[Summary]) -> Table:
    table = _table(None, "run", ACCURACY_COLUMNS)
    for summary in summaries:
        table.add_row(Text(summary.run), *_accuracy_cells(summary.accuracy))
    return table


def comparison_table(comparison: Comparison) -> Table:
    title = Text(f"{comparison.this} against {comparison.baseline}")
    columns = ("this", "baseline", "difference", "95% interval", "p (McNemar)", "gained", "lost")
    table = _table(title, "", columns)
    for name, part in comparison.datasets.items():
        table.add_row(Text(name), *_paired_cells(part))
    table.add_section()
    table.add_row("all", *_paired_cells(comparison.overall), style="bold")
    return table


def _table(title: Text | None, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _accuracy_cells(part: Accuracy) -> tuple[str, ...]:
    over_all, answered = part.over_all, part.over_answered
    cells = (percent(over_all.share), between(over_all.interval), str(over_all.count), str(over_all.total))
    return (*cells, str(part.clips), percent(answered.share), str(answered.total))


def _paired_cells(part: Paired) -> tuple[str, ...]:
    shares = (percent(part.this.share), percent(part.baseline.share))
    changed = (str(part.only_this_right), str(part.only_baseline_right))
    return (*shares, points(part.difference), points_between(part.interval), p_of(part.p_value), *changed)
