"""`dsreason score`: accuracies and reports from result files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsreason.errors import ConfigError
from dsreason.monitor.console import open_console
from dsreason.screen import print_message

if TYPE_CHECKING:
    from dsreason.evaluation.report.report import WrittenReport
    from dsreason.world.evaluation.report import ClipReport as WorldReport

WORLD_FILE = "world.json"
"""Name of the file that marks the results of a world model."""
LOG_WIDTH = 120
"""Width of tables, in characters, if the output is not a terminal."""


def score(
    results_dir: Annotated[
        Path, typer.Option(help="Folder with the results of one or more evaluations, at any level.")
    ],
    dataset: Annotated[list[str] | None, typer.Option(help="Score only this data set; may be repeated.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Results of a baseline on the same questions, to compare with.")
    ] = None,
    compat: Annotated[bool, typer.Option("--compat", help="Print the same lines as cosmos-reason1's script.")] = False,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write only summary.json and report.md.")] = False,
    frames: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of questions with images in report.html, wrong answers first; default: as many as fit into 30 MB.",
        ),
    ] = None,
) -> None:
    """Print accuracies with their intervals, and write summary.json, report.md and report.html next to the results.

    For a world model, print rewards with their intervals, and write summary.json and world.html.
    """
    if (results_dir / WORLD_FILE).is_file():
        if dataset or compat or no_html or frames is not None:
            raise ConfigError(
                f"{results_dir}: contains results of a world model, which support only --compare; remove the other options"
            )
        from dsreason.world.evaluation.report import write_report as write_world_report

        print_world_report(write_world_report(results_dir, compare))
        return
    if compat:
        if compare or no_html or frames is not None:
            raise ConfigError("--compat prints only three lines; remove --compare, --no-html and --frames")
        from dsreason.evaluation.report.calculate_accuracy import calculate_accuracy

        count = calculate_accuracy(results_dir, dataset)
        if count.files == 0:
            print_message(f"No JSON files found in directory: {results_dir}", err=True)
            raise typer.Exit(1)
        for complaint in count.complaints:
            print_message(complaint, err=True)
        for line in count.lines():
            print_message(line)
        return
    from dsreason.evaluation.report.report import write_reports

    print_reports(write_reports(results_dir, dataset, baseline=compare, with_html=not no_html, frames=frames))


def print_world_report(report: WorldReport) -> None:
    """Print the rewards and the path of the HTML page to stdout."""
    from dsreason.world.evaluation.report import make_console_tables

    console = open_console()
    for table in make_console_tables(report):
        console.print(table)
    for notice in report.notices:
        console.print(f"warning: {notice}", style="bold yellow", markup=False)
    print_message(report.file)


def print_reports(reports: list[WrittenReport]) -> None:
    """Print the accuracies (a table for one run, or one row per run) and the paths of the reports to stdout."""
    from dsreason.evaluation.report import tables

    console = open_console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    if len(reports) > 1:
        console.print(tables.make_runs_table([report.summary for report in reports]))
    for report in reports:
        if len(reports) == 1:
            console.print(tables.make_accuracy_table(report.summary))
            for name, text in tables.collect_facts(report.summary).items():
                print_message(f"{name}: {text}")
        if report.comparison:
            console.print(tables.make_comparison_table(report.comparison))
            if report.comparison.warning:
                console.print(f"warning: {report.comparison.warning}", style="bold yellow", markup=False)
        for file in report.files:
            print_message(file)
