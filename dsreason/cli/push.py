"""`dsreason push`: checkpoints and exports to S3 or the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from dsreason.errors import CheckpointError
from dsreason.files.address import HubAddress
from dsreason.monitor.progress import track


def push(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="An export, a checkpoint, or the folder of a run: its complete checkpoints and exports."
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="s3://bucket/prefix or hub:user/name, also hub:user/name/folder@branch.")
    ],
) -> None:
    """Upload a checkpoint, an export or a whole run. Files that are there with the same content are not sent again."""
    from dsreason.storage.package import finished_folders, is_run, open_package, unfinished_folders
    from dsreason.storage.storage import place_in, read_target, upload

    target = read_target(to, "--to")
    if is_run(folder):
        packages = [open_package(inside) for inside in finished_folders(folder)]
        for inside in unfinished_folders(folder):
            typer.echo(f"left out, not complete: {inside}", err=True)
        if not packages:
            raise CheckpointError(f"{folder}: the run has no complete checkpoint and no export yet")
        places = [(package, place_in(target, package.name)) for package in packages]
    else:
        places = [(open_package(folder), target)]
    for package, place in places:
        typer.echo(f"{package.folder} ({len(package.files)} files, {decimal(package.num_bytes)}) → {place}", err=True)
        if isinstance(place, HubAddress):
            sent = upload(package, place)  # the Hub's library draws its own bars
        else:
            with track("sent", package.num_bytes, "bytes") as advance:
                sent = upload(package, place, advance)
        there = len(package.files) - sent.files
        typer.echo(
            f"done: {decimal(sent.num_bytes)} sent"
            + (f", {there} of {len(package.files)} files were there" if there else ""),
            err=True,
        )
