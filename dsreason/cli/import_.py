"""`dsreason import`: conversion of a cosmos-rl configuration, with a report on every key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsreason.cli.job import find_trainers
from dsreason.config.load import read_config, read_values
from dsreason.errors import ConfigError
from dsreason.files.atomic import write_file
from dsreason.screen import print_message, write
from dsreason.tools.cosmos_rl.convert import convert, is_cosmos_rl, is_evaluation
from dsreason.tools.cosmos_rl.tables import show


def import_(
    file: Annotated[Path, typer.Argument(metavar="COSMOS.TOML", help="cosmos-rl configuration.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; default: print it.")] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A cosmos-rl key without an equivalent that may be dropped, or set to the nearest value.",
        ),
    ] = None,
) -> None:
    """Convert a cosmos-rl configuration to a dsreason configuration, and report what happened to every key."""
    from dsreason.tools.cosmos_rl.write import describe_gpus, write_command, write_toml  # slow: imports tomlkit

    document = read_config(file)
    if is_evaluation(document):
        raise ConfigError(
            f"{file}: this is a cosmos-reason1 evaluation file, which you can use without importing it; run "
            f"`dsreason eval --config {file}`"
        )
    if not is_cosmos_rl(document):
        raise ConfigError(
            f"{file}: this is not a cosmos-rl configuration: it has no section such as [policy] or [train.train_policy]"
        )
    if output is not None and output.exists():
        raise ConfigError(f"{output}: already exists; remove it, or choose another --output")
    imported = convert(document, accept or ())
    show(imported)
    imported.check(str(file))
    text = write_toml(imported, file.name)
    read_values(find_trainers()[imported.trainer].schema, imported.config, f"{file} (cosmos-rl)")
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
