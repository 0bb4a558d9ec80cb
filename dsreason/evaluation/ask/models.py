"""Meaning of `--model` in `dsreason eval` and `dsreason infer`: a model folder, a hub name, or a run or checkpoint."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsreason.checkpoints.checkpoint_folder import MARKER, find_checkpoint, find_newer_checkpoint
from dsreason.checkpoints.export import export_checkpoint
from dsreason.config.output import CHECKPOINTS, find_run_record
from dsreason.errors import CheckpointError

FINAL = Path("export") / "final"
GENERIC_NAME = re.compile(
    r"(?i:final|latest|last|best|export|checkpoints?|model|hf|(step|checkpoint|epoch|iter)[_-]?\d+)"
)
"""Names of folders that models of many runs have."""
EXPORT, MAKING, LOCK = ".export-", ".making-", "lock"


def run_weights(given: str) -> Path | None:
    """The model folder or checkpoint of the run that a path belongs to; None if it is not a run of dsreason.

    Of a run (or its `checkpoints`) the newest weights: the final export, unless a checkpoint was completed after it, as
    where the run goes on. A checkpoint means itself.

    Raises:
        CheckpointError: a run that has neither yet.
    """
    path = Path(given).expanduser()
    if is_checkpoint(path):
        return path
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    final = path / FINAL / "config.json"
    if final.is_file():
        return find_newer_checkpoint(folder, final) or path / FINAL
    newest = find_checkpoint(folder)
    if newest is None and find_run_record(path) is not None:
        raise CheckpointError(
            f"model.path {given}: the run has neither {FINAL} nor a complete checkpoint yet; wait for one, or name a model"
        )
    return newest


def is_checkpoint(path: Path) -> bool:
    return (path / MARKER).is_file()


def name_model(model: str) -> str:
    """Return the name of a model in the results: the last part of its path or hub name, with the run's before `final` or so."""
    path = Path(model).expanduser()
    parts = Path(os.path.abspath(path)).parts if path.is_dir() else path.parts
    specific = next((part for part in reversed(parts) if not GENERIC_NAME.fullmatch(part)), "/")
    last = parts[-1]
    name = last if specific in (last, "/") else f"{specific}-{last}"
    return name.replace(":", "-")


@contextmanager
def export_temporarily(checkpoint: Path, parent: Path, dtype: str) -> Iterator[Path]:
    """Export a checkpoint to a Hugging Face folder in `parent`, for only this process and as long as it needs it.

    Every such folder is locked by its process. One without is a killed process's, and is deleted here.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        own_folder = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
    except OSError as error:
        raise CheckpointError(
            f"{parent}: no room for the export of {checkpoint} ({error.strerror}); free it, or choose another folder"
        ) from None
    for left_folder in parent.glob(f"{EXPORT}*"):
        with suppress(OSError), (left_folder / LOCK).open("r+") as lock:  # in use, or gone by now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left_folder, ignore_errors=True)
    try:
        with (own_folder / LOCK).open("w") as lock:
            with suppress(OSError):  # a file system without locks: then nobody deletes another's
                fcntl.flock(lock, fcntl.LOCK_EX)
            own_folder = own_folder.rename(
                parent / own_folder.name.replace(MAKING, EXPORT)
            )  # seen by others only now that it is locked
            yield export_checkpoint(checkpoint, own_folder / "model", dtype=dtype)
    finally:
        shutil.rmtree(own_folder, ignore_errors=True)
