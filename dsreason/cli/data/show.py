"""`dsreason data show`: some rows as the model will see them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsreason.cli.job import SetOption
from dsreason.config.load import read_values
from dsreason.config.schema import SFTConfig
from dsreason.errors import ConfigError, DataError
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.screen import print_message, write

if TYPE_CHECKING:
    from dsreason.data.chat import Encoder
    from dsreason.data.sources import DataSource

FIRST_ROWS = 3
PURPOSES = ("sft", "grpo", "dpo")


def show(
    path: Annotated[str, typer.Argument(help="File, folder or hub name.")],
    purpose: Annotated[
        str, typer.Option("--for", metavar="sft|grpo|dpo", help="Trainer that will use the rows.")
    ] = "sft",
    adapter: Annotated[str, typer.Option(help="Adapter that reads the rows.")] = "auto",
    overrides: SetOption = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, or tiny:qwen2_5_vl: also count tokens by kind.")
    ] = None,
    row: Annotated[int | None, typer.Option(min=1, help="Show only this row, counted from 1.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Number of rows to show; default: 3, or all with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")] = False,
) -> None:
    """Show rows as the model will see them: messages, media, trained replies, the answer, and what is kept for rewards.

    If a row cannot be used, the reason is shown, and the exit code is 1.
    """
    if purpose not in PURPOSES:
        raise ConfigError(f"--for must be one of {', '.join(PURPOSES)}; got {purpose!r}")
    sections = {"data": {"adapter": adapter, "path": path}} | ({"model": {"path": model}} if model else {})
    config = read_values(SFTConfig, sections, "the options", overrides or ())
    launch.prepare_environment()
    from dsreason.data.formats.column_use import find_column_use
    from dsreason.data.sources import open_source

    source = open_source(config.data.list_sources()[0])
    count = len(source.rows)
    if row is not None and row > count:
        raise ConfigError(f"--row {row}: {path} has only {count} rows")
    shown = range(row - 1, row) if row is not None else range(min(count, limit or (count if as_json else FIRST_ROWS)))
    encoder = open_encoder(config) if model else None
    print_message(find_column_use(source).describe(), err=True)
    show_rows = show_json if as_json else show_text
    failed = show_rows(source, shown, purpose, encoder)
    if failed:
        raise typer.Exit(1)


def open_encoder(config: SFTConfig) -> Encoder:
    with make_imports_fast():
        from dsreason.train.common.preflight import build_encoder, find_model

    return replace(build_encoder(config, find_model(config)), needs_reply=False)


def show_json(source: DataSource, rows: range, purpose: Any, encoder: Encoder | None) -> int:
    """Print one object per row, and return the number of unusable rows."""
    from dsreason.tools.datasets.show import iter_json

    failed = 0
    for entry in iter_json(source, rows, purpose, encoder):
        write(json.dumps(entry, ensure_ascii=False))
        failed += "error" in entry
    return failed


def show_text(source: DataSource, rows: range, purpose: Any, encoder: Encoder | None) -> int:
    """Print each row in a frame, and return the number of unusable rows."""
    from dsreason.monitor.console import open_console
    from dsreason.tools.datasets.show import describe_medium, render_row, show_row

    console, failed = open_console(highlight=False), 0
    for index in rows:
        try:
            sample, split, tokens = show_row(source, index, purpose, encoder)
            title = " · ".join(filter(None, (source.rows.describe_location(index), sample.id)))
            console.print(render_row(sample, split, tokens, title, lambda part: describe_medium(part, source)))
        except DataError as error:  # a media file that cannot be read also raises this error
            print_message(error)
            failed += 1
    print_message(f"{len(rows)} of {len(source.rows)} rows shown", err=True)
    return failed
