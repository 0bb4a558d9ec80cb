"""The reports on a run: `summary.json`, `report.md` and `report.html`."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from dsreason.config.output import flatten_keys
from dsreason.errors import DataError
from dsreason.evaluation.report import tables
from dsreason.evaluation.report.compare import RunComparison, compare
from dsreason.evaluation.report.html import hash_script, make_environment, read_template
from dsreason.evaluation.report.results import (
    RUN_FILE,
    SUMMARY_FILE,
    Run,
    find_run,
    find_runs,
    read_json,
    read_run,
    write_text,
)
from dsreason.evaluation.report.score import RunSummary, is_right, judge_result, score
from dsreason.evaluation.settings import FORMER_THRESHOLD, THRESHOLD
from dsreason.evaluation.types import Result

if TYPE_CHECKING:
    from dsreason.evaluation.report.pictures import Sheet

MARKDOWN, HTML = "report.md", "report.html"
PACKAGE = "dsreason.evaluation.report"

FILTERS = {
    "right": "right",
    "wrong": "wrong, including unparsed and unanswered",
    "unparsed": "unparsed",
    "unanswered": "unanswered",
    "truncated": "truncated",
    "gained": "gained compared with the baseline",
    "lost": "lost compared with the baseline",
}
"""Filter for the cards in the HTML report → its label. A URL such as `report.html#wrong` also sets a filter."""


@dataclass(frozen=True)
class WrittenReport:
    """A report that has been written."""

    summary: RunSummary
    comparison: RunComparison | None
    files: tuple[Path, ...]


@dataclass(frozen=True)
class QuestionCard:
    """A question in the HTML report. `tags` are keys of `FILTERS`; `sheet` is None if the question's pictures are omitted."""

    anchor: str
    result: Result
    verdict: str
    tags: tuple[str, ...]
    question: str
    sheet: Sheet | None


def write_reports(
    results_dir: Path,
    dataset: Sequence[str] | None = None,
    *,
    baseline: Path | None = None,
    with_html: bool = True,
    frames: int | None = None,
) -> list[WrittenReport]:
    """Write reports on every run in `results_dir`. With a `baseline`, each of the two folders must contain exactly one run."""
    if baseline is not None:
        run, before = find_run(results_dir, dataset), find_run(baseline, dataset)
        return [write_report(run, baseline=before, with_html=with_html, frames=frames)]
    return [write_report(run, with_html=with_html, frames=frames) for run in find_runs(results_dir, dataset)]


def write_report(
    run: Run, *, baseline: Run | None = None, with_html: bool = True, frames: int | None = None
) -> WrittenReport:
    """Score a run and write `summary.json`, `report.md` and `report.html` into its folder.

    Args:
        baseline: run to compare with; None makes no comparison.
        frames: maximum number of questions with pictures, wrong answers first. None allows as many as fit into 30 MB, which
            results in a report of at most about 50 MB. The report mentions omitted pictures.

    Raises:
        DataError: a result or `run.json` is malformed, the runs cannot be compared, or the folder cannot be written.
    """
    results = read_run(run)
    settings = read_settings(run.folder)
    summary = score(results, run=run.name, left_out=run.left_out)
    comparison = compare(results, read_run(baseline), (run.name, baseline.name)) if baseline else None
    document = asdict(summary) | {"comparison": comparison and asdict(comparison)}
    texts = {
        SUMMARY_FILE: json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        MARKDOWN: render_markdown(results, summary, comparison, settings),
    }
    if with_html:
        from dsreason.evaluation.report.pictures import draw_sheets  # imports torch, which takes seconds

        sheets = draw_sheets(sorted(results, key=is_right), frames)
        texts[HTML] = render_html(results, summary, comparison, settings, sheets)
    for name, text in texts.items():
        write_text(run.folder / name, text)
    return WrittenReport(summary, comparison, tuple(run.folder / name for name in texts))


def read_settings(folder: Path) -> dict[str, str]:
    """Read the settings from `run.json`, with nested names joined by dots; return {} if the file is missing."""
    file = folder / RUN_FILE
    if not file.exists():
        return {}
    settings = read_json(file)
    if not isinstance(settings, dict):
        raise DataError(f"{file}: must contain a JSON object with the settings of the evaluation")
    values = flatten_keys(settings)
    if values.get("config.evaluation.scorer") is not None:
        values.setdefault(f"config.{THRESHOLD}", FORMER_THRESHOLD)
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in values.items()
        if value is not None
    }


# ---------------------------------------------------------------- Markdown


def render_markdown(
    results: Sequence[Result], summary: RunSummary, comparison: RunComparison | None, settings: dict[str, str]
) -> str:
    """Render the tables, and a line for every question that was not answered correctly."""
    environment = _make_environment(autoescape=False, finalize=_escape_markdown)
    wrong = [result for result in results if not is_right(result)]
    template = environment.get_template("report.md.j2")
    return template.render(summary=summary, comparison=comparison, settings=settings, wrong=wrong) + "\n"


def _escape_markdown(value: object) -> str:
    """Escape a value as literal text on one line, so that a model's output cannot become a table cell, a heading or HTML."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(text, quote=False))


# ---------------------------------------------------------------- HTML


def render_html(
    results: Sequence[Result],
    summary: RunSummary,
    comparison: RunComparison | None,
    settings: dict[str, str],
    sheets: dict[str, Sheet],
) -> str:
    """Render a self-contained page without external resources. Its content security policy allows only its own script."""
    changed = dict.fromkeys(comparison.gained, "gained") | dict.fromkeys(comparison.lost, "lost") if comparison else {}
    cards = [_make_card(n, result, changed.get(result.id), sheets) for n, result in enumerate(results, start=1)]
    counts = Counter(tag for card in cards for tag in card.tags)
    script = read_template(PACKAGE, "report.js")
    without = [card for card in cards if card.sheet is None and card.result.media]
    template = _make_environment(autoescape=True).get_template("report.html.j2")
    return template.render(
        summary=summary,
        comparison=comparison,
        settings=settings,
        cards=cards,
        anchors={card.result.id: card.anchor for card in cards},
        filters={name: (label, counts[name]) for name, label in FILTERS.items() if name in counts},
        num_without_pictures=len(without),
        wrong_without_pictures=sum(card.verdict != "right" for card in without),
        style=Markup(read_template(PACKAGE, "report.css")),
        script=Markup(script),
        script_digest=hash_script(script),
    )


def _make_card(number: int, result: Result, changed: str | None, sheets: dict[str, Sheet]) -> QuestionCard:
    result_verdict = judge_result(result)
    tags: list[str] = [result_verdict] if result_verdict in ("right", "wrong") else ["wrong", result_verdict]
    if result.finish_reason == "length":
        tags.append("truncated")
    if changed:
        tags.append(changed)
    return QuestionCard(
        f"q{number}", result, result_verdict, tuple(tags), get_question_text(result), sheets.get(result.id)
    )


def get_question_text(result: Result) -> str:
    """Return the question's text up to the list of options, which is shown separately."""
    last_prompt = result.prompt[-1] if result.prompt else ""
    first = next(iter(result.options or {}), None)
    return last_prompt if first is None else last_prompt.partition(f"\n({first}) ")[0]


def _make_environment(**options: Any) -> Environment:
    environment = make_environment(PACKAGE, **options)
    filters = (
        tables.format_percent,
        tables.format_interval,
        tables.format_points,
        tables.format_points_interval,
        tables.format_p,
    )
    functions = (tables.collect_facts, tables.score_facts, tables.list_accuracy_parts, tables.describe_grading)
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= {function.__name__: function for function in functions}
    return environment
