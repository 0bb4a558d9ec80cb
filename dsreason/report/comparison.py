"""Comparison of several runs: `comparison.html`, with overlaid curves and the configuration keys that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsreason.config.output import flatten_keys
from dsreason.files.disk import write_report
from dsreason.report.charts import Chart, Line
from dsreason.report.curves import make_charts
from dsreason.report.outcome import Outcome, measure_outcomes
from dsreason.report.page import draw_charts, format_setting, render
from dsreason.report.run_files import RunFiles

FILE = "comparison.html"
MISSING = "–"


@dataclass(frozen=True)
class ComparedRun:
    """A run with its name on the page: the name of its folder, with as many parent folders as needed to be unique."""

    name: str
    run: RunFiles


def write_comparison(runs: Sequence[RunFiles]) -> Path:
    """Write `comparison.html` to the first run's folder, and return its path."""
    file = runs[0].folder / FILE
    write_report(file, render_comparison(runs))
    return file


def render_comparison(runs: Sequence[RunFiles]) -> str:
    compared = name_runs(runs)
    return render(
        "comparison.html.j2",
        names=[item.name for item in compared],
        outcomes=align_outcomes(compared),
        sections={name: draw_charts(charts) for name, charts in overlay_charts(compared).items()},
        differences=find_differences(compared),
        notices=[f"{item.name}: {notice}" for item in compared for notice in item.run.notices],
    )


def name_runs(runs: Sequence[RunFiles]) -> list[ComparedRun]:
    """Give each run a unique short name. Example: `a/sft` and `b/sft` keep both parts; `a/x` and `b/y` become `x` and `y`."""
    paths = [run.folder.absolute().parts for run in runs]
    length = next(n for n in range(1, max(map(len, paths)) + 1) if len({path[-n:] for path in paths}) == len({*paths}))
    return [ComparedRun("/".join(path[-length:]), run) for path, run in zip(paths, runs, strict=True)]


def align_outcomes(compared: Sequence[ComparedRun]) -> dict[str, list[Outcome | None]]:
    """Return the outcomes of each measure, one per run, in order; None for runs that lack the measure."""
    outcomes = [{outcome.name: outcome for outcome in measure_outcomes(item.run)} for item in compared]
    names = dict.fromkeys(name for by_name in outcomes for name in by_name)
    return {name: [by_name.get(name) for by_name in outcomes] for name in names}


def overlay_charts(compared: Sequence[ComparedRun]) -> dict[str, list[Chart]]:
    """Combine the charts of all runs: each line in a run's charts becomes a chart with one line per run."""
    sections: dict[str, dict[tuple[str, str, str], list[Line]]] = {}
    for item in compared:
        for section, charts in make_charts(item.run.metrics, item.run.algorithm).items():
            for chart in charts:
                for line in (line for line in chart.lines if line.points):
                    lines = sections.setdefault(section, {}).setdefault((chart.title, line.label, chart.unit), [])
                    lines.append(Line(item.name, line.points, line.has_dots))
    return {
        section: [Chart(f"{title}: {label}", unit, lines) for (title, label, unit), lines in charts.items()]
        for section, charts in sections.items()
    }


def find_differences(compared: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return the configuration keys whose values differ between the runs, with each run's value."""
    configs = [flatten_keys(item.run.config) for item in compared]
    texts = [{key: format_setting(value) for key, value in config.items()} for config in configs]
    keys = dict.fromkeys(key for values in texts for key in values if key != "output_dir")
    rows = {key: [values.get(key, MISSING) for values in texts] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}
