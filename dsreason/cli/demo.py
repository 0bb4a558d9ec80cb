"""`dsreason demo`: the built-in task from beginning to end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from dsreason.cli import grpo, sft
from dsreason.cli.eval import RECIPE
from dsreason.cli.export import export
from dsreason.cli.job import Job, NprocOption, OutputOption, SetOption, run_job
from dsreason.config.load import load_config
from dsreason.config.output import default_output_dir
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.runtime import launch

WARM_START = Path("builtin_warm_start.toml")
HELD_OUT = Path("builtin_eval.toml")


def demo(output_dir: OutputOption = None, nproc: NprocOption = None, overrides: SetOption = None) -> None:
    """Train a tiny model on generated videos and images: a half wrong SFT, then GRPO. Nothing is downloaded."""
    if launch.is_rank():
        raise ConfigError("demo: starts its own ranks; call it plainly")
    folder = output_dir or default_output_dir("demo")
    ranks_on_cpu = min(2, len(os.sched_getaffinity(0)))
    changes = tuple(overrides or ())

    typer.echo("1/4 SFT on rows of which a share is deliberately mislabelled", err=True)
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

    typer.echo("2/4 GRPO from there: the reward is whether an answer is right", err=True)
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

    typer.echo("3/4 export of the last checkpoint", err=True)
    export(checkpoint=folder / "grpo", output=folder / "export")

    typer.echo("4/4 evaluation of the export on the held-out questions", err=True)
    results = evaluate_export(folder)
    Console().print(results_table(folder, accuracy_by_medium(results)))
    typer.echo(f"model: {folder / 'export'}")
    typer.echo(f"every answer: {results / 'report.html'}")
    typer.echo(f"curves: tensorboard --logdir {folder}")


def evaluate_export(folder: Path) -> Path:
    """`dsreason eval` of the exported model on the rows that the runs held out; returns the folder of its reports."""
    from dsreason.evaluation.report import write_reports
    from dsreason.evaluation.run import evaluate

    changes = [f"model.path={json.dumps(str(folder / 'export'))}", f"results_dir={json.dumps(str(folder / 'results'))}"]
    results, _ = evaluate(load_config(EvalConfig, HELD_OUT, changes, default_recipe=RECIPE))
    write_reports(results)
    return results


def accuracy_by_medium(results: Path) -> dict[str, float]:
    """As the trainer's metrics are called: `val/accuracy`, `val/accuracy/video`, `val/accuracy/image`."""
    from dsreason.evaluation.results import read_results

    right: dict[str, list[bool]] = {}
    for result in read_results(results):
        medium = "video" if any(file.endswith(".mp4") for file in result.media) else "image"
        for name in ("val/accuracy", f"val/accuracy/{medium}"):
            right.setdefault(name, []).append(result.is_correct)
    return {name: sum(values) / len(values) for name, values in right.items()}


def results_table(folder: Path, evaluated: dict[str, float]) -> Table:
    """Every held-out accuracy: of the random model, after SFT, after GRPO, and of the export in an evaluation of its own."""
    random, warm = first_and_last(folder / "sft" / "metrics.jsonl", prefix="val/accuracy")
    _, trained = first_and_last(folder / "grpo" / "metrics.jsonl", prefix="val/accuracy")
    table = Table("right answers, held out", "random model", "after SFT", "after GRPO", "export", title="dsreason demo")
    for name in trained:
        label = name.removeprefix("val/accuracy").removeprefix("/") or "all"
        table.add_row(label, *(_shown(found.get(name)) for found in (random, warm, trained, evaluated)))
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
