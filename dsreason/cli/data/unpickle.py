"""`dsreason data unpickle`: conversion of cosmos-rl's pickled text embeddings and indexes to JSON and `.npy` files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsreason.errors import DataError
from dsreason.files.disk import make_folder
from dsreason.files.lock import hold_folder
from dsreason.problems import describe_missing_file
from dsreason.screen import print_message

SUFFIXES = (".pickle", ".pkl")


def unpickle(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Pickle files, or folders with such files.")
    ],
    output: Annotated[Path, typer.Option("--output", help="Folder to write to.")],
) -> None:
    """Convert plain data in pickle files (lists, dicts, strings, numbers, numpy arrays) to JSON and .npy without running code.

    Files that contain anything else are rejected and listed; the exit code is then the one for unusable data.
    """
    from dsreason.files.plain_pickle import convert_pickle

    files = [file for path in paths for file in list_pickles(path)]
    names = [file.stem for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise DataError(f"data unpickle: two files are named {twice}; convert them into separate folders")
    make_folder(output, "--output")
    with hold_folder(output):
        for file in files:
            written = convert_pickle(file, output)
            print_message(f"{file} → {written[0]}" + (f" and {len(written) - 1} arrays" if written[1:] else ""))


def list_pickles(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{path}: contains no {' or '.join(SUFFIXES)} file; choose another folder")
        return files
    if not path.is_file():
        raise DataError(f"{path}: {describe_missing_file(path)}")
    return [path]
