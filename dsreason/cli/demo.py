"""`dsreason demo`: the built-in task from beginning to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from dsreason.cli import sft
from dsreason.cli.job import Job, NprocOption, OutputOption, SetOption, run_job
from dsreason.config.output import default_output_dir
from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError
from dsreason.runtime import launch


def demo(output_dir: OutputOption = None, nproc: NprocOption = None, overrides: SetOption = None) -> None:
    """Train a tiny model on generated videos and images, and show what it has learned. Nothing is downloaded."""
    if launch.is_rank() and output_dir is None:
        raise ConfigError("demo: starts its own ranks; call it plainly, or give every rank the same --output-dir")
    folder = output_dir or default_output_dir("demo")
    job = Job("sft", SFTConfig, sft.RECIPE, output_dir=folder, nproc=nproc, overrides=tuple(overrides or ()))
    run_job(job, check=sft.check, run=sft.run, ranks_on_cpu=min(2, len(os.sched_getaffinity(0))))
    if launch.is_first_rank():
        Console().print(results_table(folder / "metrics.jsonl"))
        typer.echo(f"model: {folder / 'export' / 'final'}\nmetrics: {folder / 'metrics.jsonl'}")
        typer.echo(f"curves: tensorboard --logdir {folder / 'tensorboard'}")


def results_table(metrics: Path) -> Table:
    """Every validation metric before the first and after the last step."""
    before, after = first_and_last(metrics, prefix="val/")
    table = Table("held-out rows", "before", "after", title="dsreason demo")
    for name in after:
        table.add_row(name.removeprefix("val/"), *(_shown(name, found) for found in (before.get(name), after[name])))
    return table


def first_and_last(metrics: Path, *, prefix: str) -> tuple[dict[str, float], dict[str, float]]:
    """The first and the last value of each metric that begins with `prefix`, from a metrics.jsonl."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in metrics.read_text().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith(prefix):
                first.setdefault(name, value)
                last[name] = value
    return first, last


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if "accuracy" in name else f"{value:.3f}"
