"""`dsreason push`: uploads of checkpoints and exports to S3 or the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.address import HubAddress
from dsreason.monitor.progress import track
from dsreason.screen import print_message


class FolderKind(StrEnum):
    """Kinds of folders, as an enum because Typer does not support lists of literals."""

    export = "export"
    checkpoint = "checkpoint"
    logs = "logs"


def push(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="An export, a checkpoint, the logs of a run, or a run, whose complete checkpoints and exports are uploaded.",
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="Target: s3://bucket/prefix, hub:user/name or hub:user/name/folder@branch.")
    ],
    include: Annotated[
        list[FolderKind] | None,
        typer.Option(help="Part of a run to upload; may be repeated. Default: export and checkpoint."),
    ] = None,
) -> None:
    """Upload a checkpoint, an export or an entire run. Files that already exist with the same content are skipped."""
    from dsreason.storage.package import is_run, open_package_or_logs
    from dsreason.storage.storage import get_folder_target, read_target, upload

    target = read_target(to, "--to")
    is_whole_run = is_run(folder)
    if include and not is_whole_run:
        raise ConfigError(f"--include {include[0]}: {folder} is not a run folder; remove --include")
    folders = list_folders(folder, include or (FolderKind.export, FolderKind.checkpoint)) if is_whole_run else [folder]
    with ExitStack() as stack:
        packages = [(inside, stack.enter_context(open_package_or_logs(inside))) for inside in folders]
        for inside, package in packages:
            place = get_folder_target(target, package.name) if is_whole_run else target
            print_message(f"{inside} ({len(package.files)} files, {decimal(package.num_bytes)}) → {place}", err=True)
            if isinstance(place, HubAddress):
                sent = upload(package, place)  # huggingface_hub displays its own progress bars
            else:
                with track("sent", package.num_bytes, "bytes") as advance:
                    sent = upload(package, place, advance)
            num_present = len(package.files) - sent.files
            print_message(
                f"done: {decimal(sent.num_bytes)} sent"
                + (f", {num_present} of {len(package.files)} files already existed" if num_present else ""),
                err=True,
            )


def list_folders(run: Path, include: Sequence[FolderKind]) -> list[Path]:
    """Return a run's complete folders of the given kinds, logs last; incomplete folders are reported to the user.

    Raises:
        CheckpointError: the run has no complete folder of these kinds.
    """
    from dsreason.storage.package import LOGS, get_folder_kind, is_logs, list_finished, list_unfinished

    folders = [inside for inside in list_finished(run) if get_folder_kind(inside) in include]
    if "logs" in include and is_logs(run / LOGS):
        folders.append(run / LOGS)
    for inside in list_unfinished(run):
        print_message(f"skipped, because it is incomplete: {inside}", err=True)
    if not folders:
        kinds = {
            FolderKind.checkpoint: "no complete checkpoint",
            FolderKind.export: "no export",
            FolderKind.logs: "no logs",
        }
        raise CheckpointError(
            f"{run}: the run has {' and '.join(text for kind, text in kinds.items() if kind in include)} yet"
        )
    return folders
