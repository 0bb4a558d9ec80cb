"""`dsreason demo`: the built-in task from beginning to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from dsreason.cli import grpo, sft
from dsreason.cli.export import export
from dsreason.cli.job import Job, NprocOption, OutputOption, SetOption, run_job
from dsreason.config.output import default_output_dir
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.runtime import launch

WARM_START = Path("builtin_warm_start.toml")


def demo(output_dir: OutputOption = None, nproc: NprocOption = None, overrides: SetOption = None) -> None:
    """Train a tiny model on generated videos and images: a half wrong SFT, then GRPO. Nothing is downloaded."""
    if launch.is_rank():
        raise ConfigError("demo: starts its own ranks; call it plainly")
    folder = output_dir or default_output_dir("demo")
    ranks_on_cpu = min(2, len(os.sched_getaffinity(0)))
    changes = tuple(overrides or ())

    typer.echo("1/3 SFT on rows of which a share is deliberately mislabelled", err=True)
    warm = Job(
        command="sft",
        schema=SFTConfig,
        default_recipe=sft.RECIPE,
        config=WARM_START,
        overrides=changes,
        output_dir=folder / "sft",
        nproc=nproc,
    )
    run_job(warm, check=sft.check, run=sft.run, ranks_on_cpu=ranks_on_cpu)

    typer.echo("2/3 GRPO from there: the reward is whether an answer is right", err=True)
    changes = (*changes, f"model.path={json.dumps(str(folder / 'sft' / 'export' / 'final'))}")
    job = Job(
        command="grpo",
        schema=GRPOConfig,
        default_recipe=grpo.RECIPE,
        overrides=changes,
        output_dir=folder / "grpo",
        nproc=nproc,
    )
    run_job(job, check=grpo.check, run=grpo.run, ranks_on_cpu=ranks_on_cpu)

    typer.echo("3/3 export of the last checkpoint", err=True)
    export(checkpoint=folder / "grpo", output=folder / "export")
    Console().print(results_table(folder))
    typer.echo(f"model: {folder / 'export'}")
    typer.echo(f"curves: tensorboard --logdir {folder}")


def results_table(folder: Path) -> Table:
    """Every held-out accuracy: of the random model, after SFT, after GRPO."""
    random, warm = first_and_last(folder / "sft" / "metrics.jsonl", prefix="val/accuracy")
    _, trained = first_and_last(folder / "grpo" / "metrics.jsonl", prefix="val/accuracy")
    table = Table("right answers, held out", "random model", "after SFT", "after GRPO", title="dsreason demo")
    for name in trained:
        label = name.removeprefix("val/accuracy").removeprefix("/") or "all"
        table.add_row(label, *(_shown(found.get(name)) for found in (random, warm, trained)))
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


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
