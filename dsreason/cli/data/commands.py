"""`dsreason data`: commands that fetch data sets, cut their clips, inspect them, and check whether every row is usable."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dsreason.cli.data.chosen_run import check_has_rows, choose_trainer, load_run
from dsreason.cli.data.fetch import CutDataset, DataDirOption, Task, fetch
from dsreason.cli.data.show import show
from dsreason.cli.data.videophy2 import fetch_videophy2
from dsreason.cli.job import ConfigOption, SetOption, Trainer
from dsreason.config.load import read_values
from dsreason.config.output import build_default_output_dir
from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.config.schema_data import DataConfig, SourceConfig
from dsreason.errors import ConfigError, DataError
from dsreason.files.atomic import write_file
from dsreason.files.disk import check_writable, make_folder
from dsreason.files.lock import hold_folder
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.problems import summarise_problems
from dsreason.screen import print_message, to_one_line, write

if TYPE_CHECKING:
    from dsreason.data.sources import SampleDataset
    from dsreason.tools.datasets.inspection import Inspection
    from dsreason.tools.datasets.rendering import Encode

R = TypeVar("R", bound=RunConfig)

app = typer.Typer(
    help="Fetch data sets, cut clips, inspect data, and validate every row.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(fetch)
app.command("fetch-videophy2")(fetch_videophy2)
app.command()(show)

SHEET_SAMPLES = 12
WorkersOption = Annotated[
    int | None, typer.Option(min=0, help="Number of worker processes; default: one per CPU core; 0: only this process.")
]


@app.command()
def clip(
    dataset: Annotated[CutDataset, typer.Option(help="Data set whose clips to cut.")],
    raw: Annotated[
        Path | None, typer.Option(help="Folder with the raw videos; default: <data-dir>/raw/<dataset>.")
    ] = None,
    data_dir: DataDirOption = Path("data"),
    task: Annotated[Task, typer.Option(help="Task whose annotations list the clips that are needed.")] = Task.benchmark,
    annotations: Annotated[
        list[Path] | None, typer.Option(help="Annotation files; default: those in <data-dir>/<task>/<dataset>.")
    ] = None,
    events: Annotated[
        Path | None, typer.Option(help="holoassist only: data-annotation*.json; default: the one in or next to --raw.")
    ] = None,
    workers: WorkersOption = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exit with 0 even if raw videos are missing.")
    ] = False,
) -> None:
    """Cut the clips that are not on the Hub from the raw videos, at exactly the frames that their names specify.

    Existing clips are kept. If clips cannot be cut, they are listed, and the exit code is 1.
    """
    launch.prepare_environment()
    from dsreason.tools.datasets.clip import cut_clips, list_needed_clips
    from dsreason.tools.datasets.clip_rules import choose_rule

    folder = data_dir / task / dataset
    names = list_needed_clips(folder, dataset, annotations or [])
    rule = choose_rule(dataset, raw or data_dir / "raw" / dataset, events=events)
    clips = cut_clips(names, rule, folder / "clips", workers=choose_num_workers(workers))
    for text in [*clips.missing, *clips.failed]:
        print_message(text)
    print_message(
        f"{len(names)} clips in {folder / 'clips'}: {len(clips.cut)} cut, {len(clips.present)} already present, "
        f"{len(clips.missing)} without a raw video, {len(clips.failed)} failed",
        err=True,
    )
    if clips.failed or (clips.missing and not allow_missing):
        raise typer.Exit(1)


@app.command()
def inspect(
    config: ConfigOption = None,
    overrides: SetOption = None,
    adapter: Annotated[
        str | None, typer.Option(help="Without --config: adapter that reads the rows; default: auto.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="Without --config: file, folder or Hub name.")] = None,
    media_path: Annotated[str, typer.Option(help="Folder against which relative media paths are resolved.")] = "",
    subset: Annotated[str | None, typer.Option(help="Subset of the data set, such as robovqa.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set, such as train or train[:100].")] = "train",
    model: Annotated[str | None, typer.Option(help="Model folder or tiny:qwen2_5_vl, to also count tokens.")] = None,
    balance: Annotated[
        str | None,
        typer.Option(help="Without --config: value of data.balance, such as answer, whose labels are counted."),
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="Test rows in the same format, to search for duplicates of rows.")
    ] = None,
    benchmark: Annotated[Path | None, typer.Option(help="Benchmark folder to search for duplicates of rows.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write to; default: outputs/inspect-<time>.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows to inspect per part, evenly spaced.")
    ] = None,
    workers: WorkersOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Report statistics of the data (lengths, media, labels, missing and duplicate rows), and show some samples.

    If rows cannot be used or media cannot be read, they are reported by reason, and the exit code is 1.
    """
    if (config is None) == (adapter is None and path is None):
        raise ConfigError("specify the data with either --config, or --path and --adapter")
    if config is not None and balance is not None:
        raise ConfigError(
            f"--balance {balance} applies only to --path; with --config, use --set data.balance={balance}"
        )
    folder = output or build_default_output_dir("inspect")
    check_writable(folder, "--output")
    run: RunConfig
    if config is not None:
        run = load_run(check_has_rows(choose_trainer(config, overrides, None)), config, overrides)
    else:
        source = {"adapter": adapter or "auto", "path": path or "", "media_path": media_path}
        data = {**source, "subset": subset, "split": split, "balance": balance}
        run = read_values(SFTConfig, {"data": data}, "the options", overrides or ())
    launch.prepare_environment()
    with make_imports_fast():
        from dsreason.cli.data.inspection_tables import show_inspection
        from dsreason.data.sources import open_datasets
        from dsreason.tools.datasets.inspection import inspect_data

    training, validation = open_datasets(run.data)
    columns = print_column_use(training)
    datasets = {"training": training, "validation": validation} if len(validation) else {"training": training}
    datasets |= collect_test_sets(run.data, test, benchmark)
    encoder = None
    if model is not None:
        with make_imports_fast():
            from dsreason.train.common.preflight import build_encoder, find_model

        measured = run.model_copy(update={"model": run.model.model_copy(update={"path": model})})
        encoder = replace(build_encoder(measured, find_model(measured)), needs_reply=False)
    make_folder(folder, "--output")
    with hold_folder(folder):
        found = inspect_data(datasets, encoder, limit=limit, workers=choose_num_workers(workers))
        write_inspection(inspection := add_labels(found, training, run.data), datasets, folder)
    if as_json:
        write(json.dumps(asdict(inspection) | {"columns": columns}, indent=2, ensure_ascii=False))
    else:
        show_inspection(inspection)
    print_message(f"written to {folder}; problems.jsonl lists all {len(inspection.problems)} problems", err=True)
    if any(part.unusable or part.unreadable_media for part in inspection.parts.values()):
        raise typer.Exit(1)


def add_labels(inspection: Inspection, training: SampleDataset, data: DataConfig) -> Inspection:
    """Add the effect of `data.balance` to the inspection; if no row has a label, add a problem instead."""
    from dsreason.data.labels import count_labels_per_epoch

    try:
        return replace(
            inspection, balance=count_labels_per_epoch(training, data.model_copy(update={"on_bad_row": "skip"}))
        )
    except DataError as error:
        problem = {"part": "training", "where": "all rows", "kind": "no labels", "reason": str(error)}
        return replace(inspection, problems=[problem, *inspection.problems])


def collect_test_sets(data: DataConfig, test: str | None, benchmark: Path | None) -> dict[str, SampleDataset]:
    from dsreason.data.sources import SampleDataset, open_source

    sources: dict[str, SourceConfig] = {}
    if test is not None:
        first = {
            key: getattr(data.list_sources()[0], key) for key in ("adapter", "media_path", "subset", "video_pattern")
        }
        sources["test"] = SourceConfig(path=test, **first)
    if benchmark is not None:
        files = sorted({*benchmark.glob("*/*_benchmark_qa_pairs.json"), *benchmark.glob("benchmark/*/*_qa_pairs.json")})
        if not files:
            raise ConfigError(
                f"--benchmark {benchmark}: contains no <dataset>/<dataset>_benchmark_qa_pairs.json; choose another folder"
            )
        sources |= {file.parent.name: SourceConfig(adapter="cosmos_reason1_rl", path=str(file)) for file in files}
    return {name: SampleDataset([open_source(source)]) for name, source in sources.items()}


def write_inspection(inspection: Inspection, datasets: dict[str, SampleDataset], folder: Path) -> None:
    """Write `inspection.json`, `problems.jsonl`, `duplicates.jsonl` and `contact_sheet.png` to the folder."""
    from dsreason.data.loader import read_row
    from dsreason.data.order import pick_evenly
    from dsreason.data.types import Sample
    from dsreason.train.common.contact_sheet import draw_sample_sheets

    document = asdict(inspection)
    for name in ("problems", "duplicates"):
        lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in document.pop(name)]
        write_file(folder / f"{name}.jsonl", "".join(lines))
    write_file(folder / "inspection.json", json.dumps(document, indent=2, ensure_ascii=False))
    training = datasets["training"]
    rows = [read_row(training, row, lambda sample: sample) for row in pick_evenly(len(training), SHEET_SAMPLES)]
    draw_sample_sheets([row for row in rows if isinstance(row, Sample)]).save(folder / "contact_sheet.png")


@app.command()
def validate(
    config: ConfigOption = None,
    overrides: SetOption = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="COMMAND",
            help="Command that the configuration is for; default: inferred from its sections.",
        ),
    ] = None,
    list_all: Annotated[
        bool,
        typer.Option("--all", help="Write all unusable rows to a file. By default, at most one screenful is printed."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows to validate per part, evenly spaced.")
    ] = None,
    workers: WorkersOption = None,
) -> None:
    """Render every row as training does: read it, decode its media and encode it. Nothing is trained.

    If rows are unusable, they are reported by reason, the first three with file and row, and the exit code is 1.
    """
    trainer = check_has_rows(choose_trainer(config, overrides, command))
    run = load_run(trainer, config, overrides)
    launch.prepare_environment()
    with make_imports_fast():
        from dsreason.tools.datasets.rendering import render_rows

    count = 0
    bad: list[str] = []
    for name, dataset, encode in list_encoded_parts(trainer, run):
        rendered, unusable = render_rows(name, dataset, encode, limit=limit, workers=choose_num_workers(workers))
        count, bad = count + rendered, bad + unusable
    for line in summarise_problems(bad):
        print_message(line)
    print_message(f"{count} rows rendered, of which {len(bad)} are unusable", err=True)
    if bad:
        print_message(f"{write_problems(bad)} lists all of them" if list_all else "--all lists all of them", err=True)
        raise typer.Exit(1)


def write_problems(messages: Sequence[str]) -> Path:
    """Write the messages to `outputs/validate-<time>/problems.txt`, one per line, and return the file's path."""
    folder = build_default_output_dir("validate")
    make_folder(folder, "--all")
    file = folder / "problems.txt"
    write_file(file, "".join(f"{to_one_line(message)}\n" for message in messages))
    return file


def list_encoded_parts(trainer: Trainer[R], run: R) -> list[tuple[str, SampleDataset, Encode]]:
    """Return (name, data set, encoding function) of the training and the held-out rows, encoded as by the trainer."""
    with make_imports_fast():
        from dsreason.data.sources import open_datasets
        from dsreason.train.common.preflight import build_encoder, find_model

    encoder = build_encoder(run, find_model(run))
    training, validation = open_datasets(run.data)
    print_column_use(training)
    as_trained = trainer.build_row_encoder(run, encoder)
    held_out = as_trained if run.held_out_as_trained else encoder.encode
    return [("training", training, as_trained), ("validation", validation, held_out)]


def print_column_use(dataset: SampleDataset) -> list[dict[str, Any]]:
    """Print which columns of each source are used, kept for rewards, and ignored, and return them as JSON values."""
    from dsreason.data.formats.column_use import find_column_use

    uses = [find_column_use(source) for source in dataset.sources]
    for use in uses:
        print_message(use.describe(), err=True)
    return [
        {
            "name": use.name,
            "formats": dict(use.formats),
            "used": sorted(use.used),
            "kept": sorted(use.kept),
            "ignored": sorted(use.ignored),
        }
        for use in uses
    ]


def choose_num_workers(workers: int | None) -> int:
    return len(os.sched_getaffinity(0)) if workers is None else workers
