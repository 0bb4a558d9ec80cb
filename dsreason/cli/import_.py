"""`dsreason import`: conversion of a configuration for cosmos-rl or cosmos-framework, with a report on every key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsreason.cli.job import find_trainers
from dsreason.config.load import read_config, read_values
from dsreason.errors import ConfigError
from dsreason.families import get_family
from dsreason.files.atomic import write_file
from dsreason.files.disk import read_json_object
from dsreason.screen import print_message, write
from dsreason.tools.cosmos_rl.convert import convert, is_evaluation, is_importable
from dsreason.tools.cosmos_rl.tables import show


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="COSMOS.TOML", help="Configuration for cosmos-rl or cosmos-framework.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; default: print it.")] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key without an equivalent that may be dropped, or set to the nearest value.",
        ),
    ] = None,
) -> None:
    """Convert a configuration for cosmos-rl or cosmos-framework, and report what happened to every key."""
    from dsreason.tools.cosmos_rl.write import describe_gpus, write_command, write_toml  # slow: imports tomlkit

    document = read_config(file)
    if is_evaluation(document):
        raise ConfigError(
            f"{file}: this is a cosmos-reason1 evaluation file, which you can use without importing it; run "
            f"`dsreason eval --config {file}`"
        )
    if not is_importable(document):
        raise ConfigError(
            f"{file}: this is not a configuration for cosmos-rl or cosmos-framework: it has no section such as [policy], "
            "[train.train_policy] or [job] with a task"
        )
    if output is not None and output.exists():
        raise ConfigError(f"{output}: already exists; remove it, or choose another --output")
    imported = convert(document, accept or ())
    show(imported)
    imported.check(str(file))
    if imported.trainer != "world":
        check_family(Path(imported.config["model"]["path"]))
    text = write_toml(imported, file.name)
    read_values(find_trainers()[imported.trainer].schema, imported.config, f"{file} ({imported.tool})")
    if output is None:
        write(text, end="")
        return
    try:
        write_file(output, text)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; choose another --output") from None
    print_message(
        f"written to {output}, for {describe_gpus(imported)}. Next: {write_command(imported, str(output))} --dry-run",
        err=True,
    )


def check_family(model: Path) -> None:
    """Raise CheckpointError if the folder `model` contains a model of an unsupported family. A model on the Hub is checked when
    it is used, before its weights are downloaded."""
    model_type = read_json_object(model / "config.json").get("model_type")
    if model_type is not None:
        get_family(model_type)
