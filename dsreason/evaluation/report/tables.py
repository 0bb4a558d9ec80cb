"""Human-readable output: numbers and texts formatted for reports, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dsreason.evaluation.report.compare import Paired, RunComparison
from dsreason.evaluation.report.score import Accuracy, Interval, Mean, Proportion, RunSummary
from dsreason.evaluation.types import KIND

NOTHING = "–"
ACCURACY_COLUMNS = ("accuracy", "95% interval", "right", "questions", "clips", "of answered", "answered")


def format_percent(value: float | None) -> str:
    """Format a share as a percentage: `72.3%`."""
    return NOTHING if value is None else f"{value:.1%}"


def format_interval(interval: Interval | None) -> str:
    """Format an interval between two fractions as percentages: `66.1–77.8%`."""
    return NOTHING if interval is None else f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}%"


def format_points(difference: float) -> str:
    """Format the difference between two shares in percentage points: `+4.2`."""
    return f"{100 * difference:+.1f}"


def format_points_interval(interval: Interval | None) -> str:
    """Format an interval of differences in percentage points: `-1.0 to +9.4`."""
    return NOTHING if interval is None else f"{format_points(interval[0])} to {format_points(interval[1])}"


def format_proportion(share: Proportion) -> str:
    """Format a proportion: `12 of 200 (6.0%)`."""
    return f"{share.count} of {share.total} ({format_percent(share.share)})"


def format_mean(mean: Mean) -> str:
    """Format a mean: `0.4321 (n = 50)`."""
    value = NOTHING if mean.value is None else f"{mean.value:.4f}"
    return f"{value} (n = {mean.n})"


def format_p(p_value: float) -> str:
    return "< 0.0001" if p_value < 0.0001 else f"{p_value:.4f}"


def collect_facts(summary: RunSummary) -> dict[str, str]:
    """Collect facts about a run in addition to its accuracies: label → text."""
    shares = {
        "unparsed answers": format_proportion(summary.unparsed),
        "truncated answers": format_proportion(summary.truncated),
    }
    if summary.unanswered:
        question, why = next(iter(summary.unanswered.items()))
        shares["unanswered questions"] = f"{len(summary.unanswered)}, for example, {question}: {why:.200}"
    if summary.accuracy.clustered:
        shares["95% interval, clustered by clip"] = format_interval(summary.accuracy.clustered)
    return shares | score_facts(summary)


def describe_grading(summary: RunSummary, settings: Mapping[str, str]) -> str:
    """Describe how the scorer and its threshold affect correctness; "" if there is no scorer.

    Args:
        settings: settings from `run.json`, with nested names joined by dots.
    """
    deciding = {name: count for name, count in summary.graded_by.items() if name != KIND}
    if deciding:
        total = sum(summary.graded_by.values())
        by = ", ".join(f"{name} ({count} of {total} answers)" for name, count in deciding.items())
        return f"An answer is correct if it was parsed and evaluation.scorer reaches evaluation.scorer_threshold: {by}."
    scorer, threshold = settings.get("config.evaluation.scorer"), settings.get("config.evaluation.scorer_threshold")
    if scorer is None:
        return ""
    without = (
        f"The scorer {scorer} does not decide which answers are correct; its mean is listed with the scores. "
        "Answers are graded"
    )
    if settings.get("config.evaluation.parser") == "compat":
        return f"{without} by their letters only, as in cosmos-reason1 (evaluation.parser is compat)."
    if threshold is None:
        return f"{without} by the kinds of the questions, because evaluation.scorer_threshold is not set."
    # Older results do not contain `graded_by`.
    return f"An answer is correct if evaluation.scorer ({scorer}) scores it at least {threshold}."


def score_facts(summary: RunSummary) -> dict[str, str]:
    means = {f"mean {name}": format_mean(mean) for name, mean in summary.scores.items()}
    if summary.corpus_bleu:
        means["corpus BLEU"] = format_mean(summary.corpus_bleu)
    if summary.pearson:
        means["Pearson's r"] = format_mean(summary.pearson)
    return means


def list_accuracy_parts(summary: RunSummary) -> list[tuple[str, dict[str, Accuracy]]]:
    """List the accuracies to show, by section: data sets, kinds of questions (if there are several), and the total."""
    parts = [("data set", summary.datasets)]
    if len(summary.kinds) > 1:
        parts.append(("kind", {f"{kind.replace('_', ' ')} questions": part for kind, part in summary.kinds.items()}))
    return [*parts, ("run", {"all": summary.accuracy})]


def make_accuracy_table(summary: RunSummary) -> Table:
    """Build a table of a run's accuracies, with one row per data set, kind of question and total."""
    table = _make_table(Text(summary.run), "", ACCURACY_COLUMNS)
    for _, parts in list_accuracy_parts(summary):
        for name, part in parts.items():
            table.add_row(Text(name), *_make_accuracy_cells(part))
        table.add_section()
    return table


def make_runs_table(summaries: Sequence[RunSummary]) -> Table:
    table = _make_table(None, "run", ACCURACY_COLUMNS)
    for summary in summaries:
        table.add_row(Text(summary.run), *_make_accuracy_cells(summary.accuracy))
    return table


def make_comparison_table(comparison: RunComparison) -> Table:
    title = Text(f"{comparison.this} compared with {comparison.baseline}")
    columns = ("this", "baseline", "difference", "95% interval", "p (McNemar)", "gained", "lost")
    table = _make_table(title, "", columns)
    for name, part in comparison.datasets.items():
        table.add_row(Text(name), *_make_paired_cells(part))
    table.add_section()
    table.add_row("all", *_make_paired_cells(comparison.overall), style="bold")
    return table


def _make_table(title: Text | None, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _make_accuracy_cells(part: Accuracy) -> tuple[str, ...]:
    over_all, answered = part.over_all, part.over_answered
    cells = (
        format_percent(over_all.share),
        format_interval(over_all.interval),
        str(over_all.count),
        str(over_all.total),
    )
    return (*cells, str(part.clips), format_percent(answered.share), str(answered.total))


def _make_paired_cells(part: Paired) -> tuple[str, ...]:
    shares = (format_percent(part.this.share), format_percent(part.baseline.share))
    changed = (str(part.only_this_right), str(part.only_baseline_right))
    return (
        *shares,
        format_points(part.difference),
        format_points_interval(part.interval),
        format_p(part.p_value),
        *changed,
    )
