"""`dsreason demo`: the built-in task from start to finish."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dsreason.cli import grpo, sft, world
from dsreason.cli.eval import RECIPE
from dsreason.cli.export import export
from dsreason.cli.job import NprocOption, OutputOption, SetOption, Trainer, TrainingCommand, run_job
from dsreason.config.load import load_config, to_toml
from dsreason.config.output import build_default_output_dir
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError, Stopped
from dsreason.job import launch, signals
from dsreason.job.failures import RankError
from dsreason.monitor.console import open_console
from dsreason.monitor.progress import PART, CommandPart, format_duration
from dsreason.screen import print_message

WARM_START = Path("builtin_warm_start.toml")
HELD_OUT = Path("builtin_eval.toml")


@dataclass(frozen=True)
class Stage:
    """A stage of the demo. Durations are in seconds on 2 idle cores: `steps` for the optimizer steps, `around` for the rest."""

    title: str
    steps: float
    around: float

    @property
    def seconds(self) -> float:
        return self.steps + self.around


STAGES = (
    Stage("SFT on rows, some of which are deliberately mislabelled", 130, 25),
    Stage("GRPO from that model: the reward is whether an answer is correct", 60, 45),
    Stage("export of the last checkpoint", 0, 8),
    Stage("evaluation of the export on the held-out questions", 0, 35),
)
WORLD_STAGES = (
    Stage("SFT of a video model on clips, half of which have wrong captions", 110, 30),
    Stage("FlowGRPO from that model: the reward is whether a square has the requested colour", 55, 25),
    Stage("DiffusionNFT from the same model, with the same reward", 70, 25),
)
WORLD_RECIPES = {name: Path(f"world_builtin_{name}.toml") for name in ("sft", "flow_grpo", "nft")}
WorldOption = Annotated[
    bool, typer.Option("--world", help="Train a tiny video model instead: SFT, then FlowGRPO and DiffusionNFT.")
]


def demo(
    output_dir: OutputOption = None,
    nproc: NprocOption = None,
    overrides: SetOption = None,
    of_world: WorldOption = False,
) -> None:
    """Train a tiny model on generated videos and images: SFT on partly wrong answers, then GRPO. Nothing is downloaded."""
    if launch.is_rank():
        raise ConfigError("demo: starts its own ranks; run it without torchrun, deepspeed or srun")
    folder, changes = output_dir or build_default_output_dir("demo"), tuple(overrides or ())
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty, but a demo starts from scratch; choose another --output-dir")
    runs: list[tuple[Trainer[Any], Path | None]] = [(sft.TRAINER, WARM_START), (grpo.TRAINER, None)]
    if of_world:
        runs = [(world.TRAINER, recipe) for recipe in WORLD_RECIPES.values()]
    for trainer, recipe in runs:
        load_config(
            trainer.schema, recipe, changes, default_recipe=trainer.recipe
        )  # report configuration errors before anything starts
    with rephrase_stop_messages(folder):
        (run_world_demo if of_world else run_answers_demo)(folder, nproc, changes)


@contextmanager
def rephrase_stop_messages(folder: Path) -> Iterator[None]:
    """Replace the advice in stop messages raised in the block, because it applies only to the training commands."""
    where_it_is = f"the output so far is in {folder}, but the next demo starts from scratch"
    try:
        yield
    except signals.Interrupted as stop:
        raise signals.Interrupted(f"{str(stop).partition(';')[0]}; {where_it_is}") from None
    except RankError as error:
        if error.exit_code != Stopped.exit_code:
            raise
        raise Stopped(f"{str(error).partition(';')[0]}; {where_it_is}") from None


def run_answers_demo(folder: Path, nproc: int | None, changes: tuple[str, ...]) -> None:
    """Train, export and evaluate a model that answers questions about clips and images."""
    ranks_on_cpu = min(2, len(os.sched_getaffinity(0)))
    started = time.monotonic()

    warm = TrainingCommand(sft.TRAINER, config=WARM_START, overrides=changes, output_dir=folder / "sft", nproc=nproc)
    with announce_stage(1, started, STAGES):
        run_job(warm, ranks_on_cpu=ranks_on_cpu)

    changes = (*changes, f"model.path={to_toml(str(folder / 'sft' / 'export' / 'final'))}")
    job = TrainingCommand(grpo.TRAINER, overrides=changes, output_dir=folder / "grpo", nproc=nproc)
    with announce_stage(2, started, STAGES):
        run_job(job, ranks_on_cpu=ranks_on_cpu)
    with announce_stage(3, started, STAGES):
        export(checkpoint=folder / "grpo", output=folder / "export")
    with announce_stage(4, started, STAGES):
        results = evaluate_export(folder)
    open_console().print(build_results_table(folder, compute_accuracies(results)))
    print_message(f"model: {folder / 'export'}")
    print_message(f"all answers: {results / 'report.html'}")
    print_message(f"curves: tensorboard --logdir {folder}")


def run_world_demo(folder: Path, nproc: int | None, changes: tuple[str, ...]) -> None:
    """Train a model that generates clips: first on clips with partly wrong captions, then with rewards, using two algorithms."""
    ranks_on_cpu = min(2, len(os.sched_getaffinity(0)))
    started, start = time.monotonic(), f"model.path={to_toml(str(folder / 'sft' / 'export' / 'final'))}"
    for number, (name, recipe) in enumerate(WORLD_RECIPES.items(), 1):
        overrides = changes if name == "sft" else (*changes, start)
        job = TrainingCommand(world.TRAINER, config=recipe, overrides=overrides, output_dir=folder / name, nproc=nproc)
        with announce_stage(number, started, WORLD_STAGES):
            run_job(job, ranks_on_cpu=ranks_on_cpu)
    open_console().print(build_world_table(folder))
    for name in WORLD_RECIPES:
        if (page := folder / name / "world.html").is_file():  # missing if validation is off
            print_message(f"clips and rewards of {name}: {page}")
    print_message(f"curves: tensorboard --logdir {folder}")


@contextmanager
def announce_stage(number: int, started: float, stages: Sequence[Stage]) -> Iterator[None]:
    """Print the stage and the demo's estimated remaining time; progress bars in the block show the same information."""
    stage = stages[number - 1]
    before, remaining = (
        sum(stage_part.seconds for stage_part in some) for some in (stages[: number - 1], stages[number - 1 :])
    )
    pace = (time.monotonic() - started) / before if before else 1.0  # slowdown of this machine relative to Stage
    print_message(f"{number}/{len(stages)} {stage.title} (about {format_duration(pace * remaining)} left)", err=True)
    after = (remaining - stage.steps) / stage.steps if stage.steps else 0.0
    os.environ[PART] = str(CommandPart(number, len(stages), after))
    try:
        yield
    finally:
        del os.environ[PART]


def evaluate_export(folder: Path) -> Path:
    """Evaluate the exported model on the held-out rows, as `dsreason eval` does, and return the reports' folder."""
    from dsreason.evaluation.report.report import write_reports
    from dsreason.evaluation.run import evaluate

    changes = [f"model.path={to_toml(str(folder / 'export'))}", f"results_dir={to_toml(str(folder / 'results'))}"]
    results, _ = evaluate(load_config(EvalConfig, HELD_OUT, changes, default_recipe=RECIPE))
    write_reports(results)
    return results


def compute_accuracies(results: Path) -> dict[str, float]:
    """Compute the accuracies, keyed like the trainer's metrics: `val/accuracy`, `val/accuracy/video`, `val/accuracy/image`."""
    from dsreason.evaluation.report.results import find_run, read_run

    right: dict[str, list[bool]] = {}
    for result in read_run(find_run(results)):
        medium = "video" if any(file.endswith(".mp4") for file in result.media) else "image"
        for name in ("val/accuracy", f"val/accuracy/{medium}"):
            right.setdefault(name, []).append(result.is_correct)
    return {name: sum(values) / len(values) for name, values in right.items()}


def build_results_table(folder: Path, evaluated: dict[str, float]) -> Table:
    """Build the table of held-out accuracies: with random weights, after SFT, after GRPO, and in the export's evaluation."""
    random, warm = read_first_and_last(folder / "sft" / "metrics.jsonl", prefix="val/accuracy")
    _, trained = read_first_and_last(folder / "grpo" / "metrics.jsonl", prefix="val/accuracy")
    table = Table(
        "correct answers, held out", "random model", "after SFT", "after GRPO", "export", title="dsreason demo"
    )
    for name in trained:
        label = name.removeprefix("val/accuracy").removeprefix("/") or "all"
        table.add_row(label, *(_format(accuracies.get(name)) for accuracies in (random, warm, trained, evaluated)))
    return table


def build_world_table(folder: Path) -> Table:
    """Build the table of rewards for the held-out prompts, all from the same noise, and of metrics that reveal reward hacking."""
    titles = ("after SFT", "after FlowGRPO", "after NFT")
    last = [read_first_and_last(folder / name / "metrics.jsonl", prefix="val/")[1] for name in WORLD_RECIPES]
    table = Table("held-out prompts", *titles, title="dsreason demo --world")
    rows = {"reward (colour · solid)": "val/reward/mean", "requested colour": "val/reward/colour/mean"}
    rows |= {"solid square": "val/reward/solid/mean", "brightness": "val/brightness"}
    for label, name in rows.items():
        table.add_row(label, *(_format(values.get(name), ".3f") for values in last))
    return table


def read_first_and_last(metrics: Path, *, prefix: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the first and the last value of each metric in a metrics.jsonl file whose name starts with `prefix`."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in metrics.read_bytes().splitlines():
        for name, value in json.loads(line).items():
            if name.startswith(prefix):
                first.setdefault(name, value)
                last[name] = value
    return first, last


def _format(value: float | None, form: str = ".1%") -> str:
    return "-" if value is None else f"{value:{form}}"
