"""`dsreason eval`: evaluate a model by grading its answers to questions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dsreason.checkpoints.checkpoint_folder import find_newer_checkpoint
from dsreason.cli.job import ConfigOption, NprocOption, SetOption
from dsreason.config.keys import split_unknown
from dsreason.config.load import load_config, read_config, read_values, to_toml
from dsreason.config.output import CHECKPOINTS, CONFIG_FILE, read_record
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError
from dsreason.files.disk import check_writable
from dsreason.imports import make_imports_fast
from dsreason.job import launch, signals
from dsreason.job.gpu import check_gpus
from dsreason.problems import describe_missing_file
from dsreason.screen import print_message
from dsreason.secrets import iter_masked_keys
from dsreason.world.schema import WorldConfig

RECIPE = "eval.toml"
FINAL = Path("export") / "final"
EXPORTED = ("model_index.json", "pytorch_lora_weights.safetensors")
"""Files by which a folder with a world model or its adapter is recognised."""
TP_SIZE, TP_KEY = "TP_SIZE", "model.tensor_parallel_size"
"""Environment variable for the tensor-parallel size in cosmos-reason1's guides, and the equivalent key."""


def evaluate(
    config: ConfigOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder, Hub name, dsreason run (its newest weights are used), or dsreason checkpoint."
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server to query instead of loading a model.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Benchmark folder, such as robovqa; may be repeated.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with benchmark folders, a JSONL file, or a path that --adapter reads.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="Adapter that reads --data, such as llava or builtin.")] = None,
    answer_type: Annotated[
        Literal["letter", "reasoning"] | None, typer.Option(help="Ask for only the answer, or for reasoning first.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Number of GPUs that share one copy of the model.")
    ] = None,
    results_dir: Annotated[Path | None, typer.Option(help="Folder for the answers; default: results.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of questions, taken evenly from the data sets.")
    ] = None,
    compat: Annotated[
        bool, typer.Option("--compat", help="Read and grade answers exactly as cosmos-reason1 does.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the stored answers of these data sets first.")
    ] = False,
    nproc: NprocOption = None,
    overrides: SetOption = None,
) -> None:
    """Ask a model the questions of benchmarks or of your own data, and grade its answers. Run the command again to continue an
    interrupted evaluation.

    For a world model (a dsreason world run or its configuration), clips are sampled for held-out prompts and scored.
    """
    if (world := find_world(config, model)) is not None:
        of_answers: dict[str, object] = {
            **{"--server": server, "--dataset": dataset, "--data": data, "--adapter": adapter},
            **{"--answer-type": answer_type, "--tensor-parallel-size": tensor_parallel_size, "--compat": compat},
        }
        if set_options := [name for name, value in of_answers.items() if value]:
            raise ConfigError(f"{set_options[0]} does not apply to world models; remove it")
        limits = [] if limit is None else [f"validation.max_samples={limit}"]
        evaluate_world(world, model, [*limits, *(overrides or ())], results_dir, nproc, overwrite=overwrite)
        return
    if config is None and not overrides:
        check_complete(model or server, data or dataset or adapter)
    options = {
        "server.url": server,
        "evaluation.answer_type": answer_type,
        "evaluation.limit": limit,
        "evaluation.parser": "compat" if compat else None,
        "evaluation.overwrite": overwrite or None,
        "model.tensor_parallel_size": tensor_parallel_size,
        "results_dir": results_dir and str(results_dir),
    }
    question_changes = build_question_overrides(dataset or [], data, adapter, named=has_datasets(config))
    changes = [*question_changes, *build_model_overrides(model, server)]
    changes += [f"{key}={to_toml(value)}" for key, value in options.items() if value is not None]
    changes += overrides or ()  # last, so that they take precedence
    if launch.is_rank():
        with make_imports_fast():
            from dsreason.job import lifeline  # imports torch

        with lifeline.join_with_lifeline("in the evaluation"):
            loaded = load(config, changes)  # must not happen earlier, because TP_SIZE may come from the first host
            if loaded.server.url is not None and int(os.environ["WORLD_SIZE"]) > 1:
                raise ConfigError(
                    f"server.url ({loaded.server.url}): a server is queried by a single process, but "
                    f"{os.environ['WORLD_SIZE']} were started; run dsreason eval without torchrun, deepspeed or srun"
                )
            run(loaded)
        return
    loaded = load(config, changes)
    launch.prepare_environment()
    for note in loaded.notes(len(os.sched_getaffinity(0))):
        print_message(f"note: {note}", err=True)
    ranks = 1
    if loaded.server.url is None:
        check_gpus()
        ranks = launch.count_ranks(nproc, launch.count_gpus(), on_cpu=loaded.model.tensor_parallel_size)
    folder = Path(loaded.results_dir).expanduser()
    check_writable(folder, "--results-dir")
    with signals.add_stop_message(f"the answers so far are in {folder}; repeat the command to continue"):
        if ranks == 1:
            launch.kill_children_on_exit()
            run(loaded)
            return
        check(loaded)
        launch.start_ranks(lambda attempt: build_arguments(config, changes), ranks=ranks, log_dir=folder / "logs")


@dataclass(frozen=True)
class WorldSource:
    """The configuration for evaluating a world model, and its origin."""

    values: dict[str, Any]
    name: str
    arguments: list[str]
    """Command-line arguments by which a rank finds the same configuration."""


def find_world(config: Path | None, model: str | None) -> WorldSource | None:
    """Return the configuration for a world model: `config` or, if it is None, the configuration of the run that made `model`.

    Returns:
        The configuration and its origin; None if it is not for a world model.
    """
    if config is not None:
        values = read_config(config)
        values = (
            values["config"] if isinstance(values.get("config"), dict) else values
        )  # the file is a run's config.json
        return WorldSource(values, str(config), [f"--config={config}"]) if is_world(values) else None
    for folder in list_possible_runs(Path(model).expanduser()) if model else ():
        values = read_recorded_values(folder)
        if "world" in values:
            return WorldSource(values, str(folder / CONFIG_FILE), [])
    return None


def read_recorded_values(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in `folder`; {} if its `config.json` is missing or belongs to a model.

    Raises:
        ConfigError: the `config.json` of a run is damaged.
    """
    try:
        return dict(read_record(folder)["config"])
    except (OSError, ValueError, RecursionError) as error:
        if (folder / CHECKPOINTS).is_dir() and os.path.lexists(folder / CONFIG_FILE):
            raise ConfigError(
                f"{folder / CONFIG_FILE}: is not a valid run configuration ({error}); restore it, or pass --config"
            ) from None
        return {}


def list_possible_runs(path: Path) -> list[Path]:
    """Return folders that may be the run to which `path` belongs (`RUN`, `RUN/export/…` or `RUN/checkpoints/…`).

    The list is empty if `path` does not exist.
    """
    path = path.absolute()
    if not path.exists():
        return []
    above = [folder.parent for folder in (path, path.parent) if folder.name in (FINAL.parent.name, CHECKPOINTS)]
    return [path, *above]


def is_world(values: dict[str, Any]) -> bool:
    """Return whether a configuration is for world models: it has `[world]`, or has keys that exist only for training them."""
    if "world" in values:
        return True
    return bool(split_unknown(EvalConfig, values)[1]) and not split_unknown(WorldConfig, values)[1]


def resolve_export(model: str) -> str:
    """Return the final export if `model` is a run, or else `model` unchanged.

    Raises:
        ConfigError: `model` is a run or a checkpoint without an export, or the run has a checkpoint newer than its export.
    """
    folder = Path(model).expanduser()
    final = folder / FINAL
    files = [place / name for place in (final, folder) for name in EXPORTED if (place / name).is_file()]
    if final.is_dir() and files and (newer := find_newer_checkpoint(folder / CHECKPOINTS, files[0])):
        raise ConfigError(
            f"--model {model}: checkpoint {newer.name} is newer than {FINAL}; export it with dsreason export "
            f"--checkpoint {newer} --output {folder / FINAL.parent / newer.name}, and pass that folder, or pass {final}"
        )
    if final.is_dir():
        return str(final)
    if folder.is_dir() and not files:
        raise ConfigError(
            f"--model {model}: contains neither a model in diffusers' format nor {FINAL}; create one with dsreason export "
            f"--checkpoint {model} --output FOLDER, with FOLDER in the run's {FINAL.parent}, and pass FOLDER"
        )
    return model


def check_unmasked(config: WorldConfig, name: str) -> None:
    """Raise ConfigError if the evaluation needs a value that is masked in the file `name`, such as a run's `config.json`."""
    needed = config.model_dump(mode="json", include={"model", "data", "world", "reward", "validation"})
    if keys := list(iter_masked_keys(needed)):
        raise ConfigError(
            f"{name}: {', '.join(keys)}: the stored secret is masked; pass the run's original configuration file with --config, "
            "or set the value with --set"
        )


def evaluate_world(
    source: WorldSource,
    model: str | None,
    changes: list[str],
    results_dir: Path | None,
    nproc: int | None,
    *,
    overwrite: bool,
) -> None:
    """Sample and score clips for the held-out prompts on all GPUs, and write and print the report."""
    if model is not None:
        changes = [f"model.path={to_toml(resolve_export(model))}", *changes]
    config = read_values(WorldConfig, source.values, source.name, changes)
    check_unmasked(config, source.name)
    with make_imports_fast():
        from dsreason.evaluation.ask.models import name_model
        from dsreason.world.evaluation.report import write_report
        from dsreason.world.training import evaluate as world
    folder = (results_dir or Path("results")) / name_model(config.model.path)
    if launch.is_rank():
        world.evaluate(config, folder, overwrite=overwrite)
        return
    check_writable(folder, "--results-dir")
    launch.prepare_environment()
    check_gpus()
    world.check(config, folder, overwrite=overwrite)
    arguments = [
        *source.arguments,
        *([] if model is None else [f"--model={model}"]),
        *(f"--set={change}" for change in changes),
    ]
    arguments += [] if results_dir is None else [f"--results-dir={results_dir}"]
    arguments += ["--overwrite"] if overwrite else []
    ranks = launch.count_ranks(nproc, launch.count_gpus())
    launch.start_ranks(lambda attempt: ["-m", "dsreason", "eval", *arguments], ranks=ranks, log_dir=folder / "logs")
    with make_imports_fast():
        from dsreason.cli.results.score import print_world_report
    print_world_report(write_report(folder))


def load(config: Path | None, changes: list[str]) -> EvalConfig:
    """Load the configuration. The environment variable TP_SIZE overrides the file; the command line overrides both."""
    tensor_parallel_size = os.environ.get(TP_SIZE)
    if not tensor_parallel_size:
        return load_config(EvalConfig, config, changes, default_recipe=RECIPE)
    if not tensor_parallel_size.isdecimal() or int(tensor_parallel_size) < 1:
        raise ConfigError(
            f"{TP_SIZE} ({tensor_parallel_size!r} in the environment): must be a whole number of at least 1; correct or unset it"
        )
    loaded = load_config(EvalConfig, config, [f"{TP_KEY}={tensor_parallel_size}", *changes], default_recipe=RECIPE)
    asks_model = loaded.server.url is None and loaded.model.tensor_parallel_size == int(tensor_parallel_size)
    if asks_model and launch.is_first_rank():
        print_message(f"note: {TP_KEY} is {tensor_parallel_size}, from {TP_SIZE} in the environment", err=True)
    return loaded


def check_complete(model_source: object, question_source: object) -> None:
    """Raise a ConfigError that lists the available options if the model or the questions are missing."""
    missing = [] if model_source else ["no model is set: use --model D or --server URL"]
    missing += [] if question_source else ["no questions are set: use --data D, --dataset NAME or --adapter NAME"]
    if missing:
        raise ConfigError("; ".join(missing) + " (or --config eval.toml)")


def has_datasets(config: Path | None) -> bool:
    return config is not None and bool(read_config(config).get("datasets"))


def build_question_overrides(datasets: list[str], data: str | None, adapter: str | None, *, named: bool) -> list[str]:
    """Build the overrides that select the questions.

    Args:
        data: folder with benchmarks, file with rows, or path for the adapter.
        named: whether the configuration lists benchmarks. If so, a folder in `data` only sets their location; otherwise, all
            benchmarks in the folder are used.
    """
    changes = []
    if adapter is not None or (data is not None and Path(data).is_file()):
        if datasets:
            raise ConfigError(
                f"--dataset {datasets[0]} selects a benchmark folder, but --data {data} is read as rows; remove one of them"
            )
        rows = {"adapter": adapter or "jsonl"} | ({"path": data} if data is not None else {})
        pairs = ", ".join(f"{key} = {to_toml(value)}" for key, value in rows.items())
        return ["datasets=[]", f"sources=[{{{pairs}}}]"]
    if data is not None:
        if Path(data).exists() and not Path(data).is_dir():
            raise ConfigError(f"--data {data}: {describe_missing_file(Path(data))}")
        if not Path(data).is_dir():
            raise ConfigError(f"--data {data}: no such file or folder (working folder: {Path.cwd()})")
        if not (named or datasets or list_benchmarks(Path(data))):
            raise ConfigError(
                f"--data {data}: neither this folder nor {data}/benchmark contains <name>/<name>_benchmark_qa_pairs.json; "
                "set --adapter if the rows have another format"
            )
        changes.append(f"data_dir={to_toml(data)}")
        datasets = datasets or ([] if named else list_benchmarks(Path(data)))
    if datasets:
        changes += [f"datasets={to_toml(datasets)}", "sources=[]"]
    return changes


def list_benchmarks(folder: Path) -> list[str]:
    return sorted(
        {
            file.parent.name
            for place in (folder, folder / "benchmark")
            for file in place.glob("*/*_benchmark_qa_pairs.json")
            if file.name == f"{file.parent.name}_benchmark_qa_pairs.json"
        }
    )


def build_model_overrides(model: str | None, server: str | None) -> list[str]:
    """Build the overrides that select the model or server instead of the one in the configuration file."""
    if model is not None and server is not None:
        raise ConfigError(f"--model {model} and --server {server} are mutually exclusive; remove one")
    return [] if model is None and server is None else ["server.url=null", f"model.path={to_toml(model)}"]


def build_arguments(config: Path | None, changes: list[str]) -> list[str]:
    """Build the command-line arguments with which each rank starts Python."""
    arguments = [] if config is None else [f"--config={config}"]
    return ["-m", "dsreason", "eval", *arguments, *(f"--set={change}" for change in changes)]


def check(config: EvalConfig) -> None:
    """Check the scorer, questions and model, so that user errors are raised before ranks start."""
    with make_imports_fast():
        from dsreason.evaluation.ask.answerers import check_model
        from dsreason.evaluation.questions.grading import Grader, check_scorer
        from dsreason.evaluation.questions.questions import load_questions

    check_scorer(config.evaluation, load_questions(config))
    with Grader(config.evaluation):
        check_model(config)


def run(config: EvalConfig) -> None:
    with make_imports_fast():
        from dsreason.cli.results.score import print_reports
        from dsreason.evaluation.report.report import write_reports
        from dsreason.evaluation.run import evaluate as run_evaluation
        from dsreason.evaluation.vision import apply_choice, choose_evaluation_vision

    vision = choose_evaluation_vision(config)
    if launch.is_first_rank():
        print_message(vision.describe(), err=True)
    folder, throughput = run_evaluation(apply_choice(config, vision), vision.to_json())
    if launch.is_first_rank():
        print_message(str(throughput), err=True)
        print_reports(write_reports(folder, None))
