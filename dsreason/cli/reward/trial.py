"""`dsreason reward try`: scores of completions by the rewards of a run, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsreason.cli.job import ConfigOption, SetOption, find_trainers
from dsreason.config.load import read_values
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.screen import print_message, write
from dsreason.tools.cosmos_rl.loading import load_run

if TYPE_CHECKING:
    from rich.table import Table

    from dsreason.data.types import Sample
    from dsreason.rewards.scoring import FunctionScore

FIRST_ROWS = 4
WRONG = "I cannot tell."
"""Completion that no reward for correct answers should accept."""
SHOWN_CHARACTERS = 60
LOG_WIDTH = 140
"""Width of tables, in characters, if the output is not a terminal."""


@dataclass(frozen=True)
class Attempt:
    """A completion of a row. Example: `Attempt(row=1, kind="answer", completion="left", sample=sample)`."""

    row: int
    """Number of the row, counted from 1."""
    kind: str
    """Origin: `answer` (the row's own), `wrong` (an obviously wrong text), `completion` (from the user) or `sampled`."""
    completion: str
    sample: Sample
    ids: tuple[int, ...] = ()
    """Tokens of a sampled completion; empty if the completion has another origin."""


def try_rewards(
    config: ConfigOption = None,
    overrides: SetOption = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Without --config: reward, as in reward.functions; may be repeated."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="With --reward: file, folder or Hub data set that contains the rows.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, from the start.")] = FIRST_ROWS,
    completion: Annotated[str | None, typer.Option(metavar="TEXT", help="Completion of every row.")] = None,
    completions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSONL file with a completion per row: a string, or an object with `completion`."
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Let the run's model sample N completions per row; with --config."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per completion.")] = False,
) -> None:
    """Call the rewards of a GRPO run on the first rows, and print value, parts and seconds of each call.

    Without --completion, --completions or --sample, each row is scored twice: with its own answer, and with an obviously wrong
    text. Only --sample loads the model.
    """
    check_origin(config, completion, completions, sample)
    run = load_rewards(config, overrides or [], reward or [], path)
    launch.prepare_environment()
    with make_imports_fast():
        from dsreason.data.sources import open_datasets
        from dsreason.rewards.scoring import Scorer
        from dsreason.train.grpo.check_rewards import check_functions, select_functions

    check_functions(run)
    names = [name for name in run.reward.functions if sample or name != "overlong"]
    if len(names) < len(run.reward.functions):
        print_message("overlong is left out, because it needs the tokens of a sampled completion (--sample)", err=True)
    training, _ = open_datasets(run.data)
    first = [training[index] for index in range(min(rows, len(training)))]
    samples = [replace(row, id=row.id or f"row {number}") for number, row in enumerate(first, 1)]
    attempts = sample_attempts(run, samples, sample) if sample else list_attempts(samples, completion, completions)
    with Scorer(select_functions(run.reward, names, workers=run.reward.workers)) as scorer:
        scores, extra = scorer.score_by_function(
            [attempt.completion for attempt in attempts],
            [attempt.sample for attempt in attempts],
            [attempt.ids for attempt in attempts] if sample else None,
        )
        totals = scorer.sum_scores(scores).tolist()
    if as_json:
        for number, attempt in enumerate(attempts):
            by_function = {label: values[number] for label, values in scores.items()}
            write(json.dumps(to_json(attempt, by_function, totals[number]), ensure_ascii=False, allow_nan=False))
    else:
        print_tables(attempts, scores)
        for name, values in extra.items():
            print_message(f"{name}: {', '.join(f'{value:g}' for value in values)}")


def load_rewards(config: Path | None, overrides: list[str], reward: list[str], path: str | None) -> GRPOConfig:
    """Load the configuration of a GRPO run, or build one from `--reward` and `--path`."""
    if (config is None) == (not reward):
        raise ConfigError("specify the rewards with either --config, or --reward and --path")
    if config is not None:
        if path is not None:
            raise ConfigError(f"--path {path} applies only to --reward; with --config, use --set data.path={path}")
        trainer = find_trainers()["grpo"]
        return load_run("grpo", GRPOConfig, config, overrides, default_recipe=trainer.recipe)[0]
    if path is None:
        raise ConfigError("--reward needs rows to score; specify their file with --path")
    values = {"data": {"adapter": "auto", "path": path}, "reward": {"functions": dict.fromkeys(reward, 1.0)}}
    return read_values(GRPOConfig, values, "the options", overrides)


def check_origin(config: Path | None, completion: str | None, completions: Path | None, sample: int | None) -> None:
    """Raise ConfigError if the completions would come from two places, or from a model that no configuration names."""
    options = {"--completion": completion, "--completions": completions, "--sample": sample}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined; keep one of them")
    if sample and config is None:
        raise ConfigError("--sample needs the model of a run; specify its configuration with --config")


def sample_attempts(run: GRPOConfig, samples: Sequence[Sample], count: int) -> list[Attempt]:
    """Sample `count` completions per row with the run's model and sampling settings."""
    with make_imports_fast():
        from dsreason.train.grpo.trial import sample_completions

    return [
        Attempt(number, "sampled", completion.text, sample, completion.ids)
        for number, completions in enumerate(sample_completions(run, samples, count), 1)
        for sample, completion in completions
    ]


def list_attempts(samples: Sequence[Sample], completion: str | None, file: Path | None) -> list[Attempt]:
    """Return the completions to score, in row order."""
    if file is not None:
        texts = read_completions(file)
        if len(texts) > len(samples):
            raise ConfigError(
                f"{file}: has {len(texts)} completions, but there are {len(samples)} rows; remove completions, or raise --rows"
            )
        return [
            Attempt(number, "completion", text, sample)
            for number, (text, sample) in enumerate(zip(texts, samples, strict=False), 1)
        ]
    if completion is not None:
        return [Attempt(number, "completion", completion, sample) for number, sample in enumerate(samples, 1)]
    attempts = []
    for number, sample in enumerate(samples, 1):
        if sample.answer is not None:
            attempts.append(Attempt(number, "answer", sample.answer, sample))
        attempts.append(Attempt(number, "wrong", WRONG, sample))
    return attempts


def read_completions(file: Path) -> list[str]:
    """Read a completion from each line: a JSON string, or an object with `completion`."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; choose a JSONL file") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        text = value.get("completion") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ConfigError(
                f'{file}, line {number}: must be a JSON string or an object with the text "completion"; got {line:.100}'
            )
        texts.append(text)
    return texts


def to_json(attempt: Attempt, scores: dict[str, FunctionScore | None], total: float) -> dict[str, Any]:
    """Return an attempt with its scores as JSON values; the score of a function that does not apply is null."""
    return {
        "row": attempt.row,
        "id": attempt.sample.id,
        "kind": attempt.kind,
        "completion": attempt.completion,
        "total": None if total != total else total,
        "rewards": {
            label: None
            if score is None
            else {"value": score.value, "parts": dict(score.metrics), "seconds": round(score.seconds, 6)}
            for label, score in scores.items()
        },
    }


def print_tables(attempts: Sequence[Attempt], scores: dict[str, list[FunctionScore | None]]) -> None:
    from dsreason.monitor.console import open_console

    console = open_console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    for label, values in scores.items():
        console.print(make_table(label, attempts, values))


def make_table(label: str, attempts: Sequence[Attempt], scores: Sequence[FunctionScore | None]) -> Table:
    """Build the table of a function: a line per completion."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(label), title_justify="left", box=SIMPLE_HEAD)
    for name in ("row", "id", "completion", "value", "parts", "seconds"):
        table.add_column(name, justify="right" if name in ("row", "value", "seconds") else "left")
    for attempt, score in zip(attempts, scores, strict=True):
        text = " ".join(attempt.completion.split())
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
        cells = [
            str(attempt.row),
            attempt.sample.id,
            shown if attempt.kind in ("completion", "sampled") else f"{attempt.kind}: {shown}",
        ]
        if score is None:
            cells += ["–", "excluded by reward.only", ""]
        else:
            parts = ", ".join(f"{name} {value:g}" for name, value in score.metrics.items())
            cells += ["None" if score.value is None else f"{score.value:g}", parts, f"{score.seconds:.3f}"]
        table.add_row(*map(Text, cells))
    return table
