"""`dsreason report`: a page about a run, and a comparison of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsreason.errors import ConfigError
from dsreason.screen import print_message


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Output folder of a run, and of runs to compare it with."),
    ],
) -> None:
    """Write run.html, which shows what a run has learned: results, warnings, curves, rollouts and answers.

    For several runs, also write comparison.html into the folder of the first one, with their curves and the configuration keys
    that differ. For a run of a world model, write world.html.
    """
    from dsreason.report.comparison import write_comparison
    from dsreason.report.page import write_run_page
    from dsreason.report.run_files import open_run

    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("the same run is given twice; give each run once")
    opened = [open_run(run) for run in runs]
    for run in opened:
        if "world" in run.config:
            from dsreason.world.evaluation.history import write_run_page as write_world_page

            page = write_world_page(run.folder)
        else:
            page = write_run_page(run)
        print_message(f"{run.folder}: has no validation yet, so there is no page" if page is None else str(page))
    if len(opened) > 1:
        print_message(str(write_comparison(opened)))
