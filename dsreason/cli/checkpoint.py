"""`dsreason checkpoint`: checks of saved checkpoints and exports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from dsreason.errors import CheckpointError
from dsreason.screen import print_message

app = typer.Typer(help="Check saved checkpoints.", no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def keep_group() -> None:
    # Without a callback, Typer would drop the name of the subcommand, because there is only one.
    pass


@app.command()
def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Runs, of which all checkpoints and exports are verified, or single ones."
        ),
    ],
) -> None:
    """Compare every file of checkpoints and exports with its digest. The exit code is 1 if any is damaged."""
    is_damaged = False
    for folder in [folder for path in paths for folder in list_folders(path)]:
        try:
            print_message(f"{folder}: {verify_folder(folder)}")
        except CheckpointError as error:
            if folder.is_dir():  # otherwise the run has deleted it in the meantime
                is_damaged = True
                print_message(f"{folder}: damaged: {error}")
    if is_damaged:
        raise typer.Exit(1)


def list_folders(path: Path) -> list[Path]:
    """Return the checkpoint or export at `path`. If `path` is a run, return its checkpoints and then its exports, by step.

    Raises:
        CheckpointError: `path` contains neither a checkpoint nor an export.
    """
    from dsreason.checkpoints.marker import MARKER, STATE_FILE
    from dsreason.files.step_names import is_step_name, parse_step
    from dsreason.storage.package import CHECKPOINTS, EXPORTS, list_exports

    def list_steps(folder: Path) -> Iterator[Path]:
        steps = [step for step in folder.iterdir() if is_step_name(step.name) and step.is_dir()]
        return iter(sorted(steps, key=parse_step))

    if (
        (path / MARKER).is_file()
        or (path / STATE_FILE).is_file()
        or path.absolute().parent.name in (CHECKPOINTS, EXPORTS)
    ):
        folders = [path] if path.is_dir() else []
    elif path.name == CHECKPOINTS and path.is_dir():
        folders = list(list_steps(path))
    else:
        folders = list(list_steps(path / CHECKPOINTS)) if (path / CHECKPOINTS).is_dir() else []
        folders += list_exports(path)
    if not folders:
        raise CheckpointError(f"{path}: contains no checkpoint and no export; choose one, or the folder of a run")
    return folders


def verify_folder(folder: Path) -> str:
    """Verify a checkpoint or export, and return a summary for the user; raise CheckpointError if it is damaged."""
    from dsreason.checkpoints.checkpoint_folder import read_checkpoint
    from dsreason.checkpoints.export_digests import DIGESTS_FILE
    from dsreason.checkpoints.marker import MARKER, STATE_FILE, check_content
    from dsreason.storage.package import CHECKPOINTS, open_export

    is_checkpoint = folder.absolute().parent.name == CHECKPOINTS
    if not (is_checkpoint or (folder / MARKER).is_file() or (folder / STATE_FILE).is_file()):
        package = open_export(folder)
        gaps = (
            ""
            if (folder / DIGESTS_FILE).is_file()
            else "; it has no digests, so only headers and sizes can be verified"
        )
        return f"sound ({len(package.files)} files, {decimal(package.num_bytes)}){gaps}"
    read_checkpoint(folder)
    marker = check_content(folder)
    gaps = f"; {marker.gaps}" if marker.gaps else ""
    return f"sound ({len(marker.sizes)} files, {decimal(sum(marker.sizes.values()))}){gaps}"
