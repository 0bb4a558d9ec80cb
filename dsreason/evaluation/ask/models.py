"""Resolution of `--model` for `dsreason eval` and `dsreason infer`: a model folder, a Hub name, a run or a checkpoint."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dsreason.checkpoints.checkpoint_folder import find_checkpoint, find_newer_checkpoint
from dsreason.checkpoints.export import export_checkpoint
from dsreason.checkpoints.marker import MARKER
from dsreason.config.output import CHECKPOINTS, find_run_record
from dsreason.errors import CheckpointError

FINAL = Path("export") / "final"
GENERIC_NAME = re.compile(
    r"(?i:final|latest|last|best|export|checkpoints?|model|hf|(step|checkpoint|epoch|iter)[_-]?\d+)"
)
"""Pattern for folder names that are too generic to identify a model."""
EXPORT, MAKING, LOCK = ".export-", ".making-", "lock"


def find_run_weights(model: str) -> Path | None:
    """Return the folder with the weights of a dsreason run or checkpoint; None if `model` is neither.

    For a run or its `checkpoints` folder, this is the folder with the newest weights: the final export, unless the run was
    continued and completed a later checkpoint. A checkpoint is returned unchanged.

    Raises:
        CheckpointError: the run has neither an export nor a complete checkpoint yet.
    """
    path = Path(model).expanduser()
    if is_checkpoint(path):
        return path
    folder = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    final = path / FINAL / "config.json"
    if final.is_file():
        return find_newer_checkpoint(folder, final) or path / FINAL
    newest = find_checkpoint(folder)
    if newest is None and find_run_record(path) is not None:
        raise CheckpointError(
            f"model.path {model}: the run has neither {FINAL} nor a complete checkpoint yet; wait for one, or specify a "
            "model"
        )
    return newest


def is_checkpoint(path: Path) -> bool:
    return (path / MARKER).is_file()


def name_model(model: str) -> str:
    """Return the model's name in the results: the last component of its path or Hub name, preceded by a more specific
    component, such as the run's name, if the last is generic."""
    path = Path(model).expanduser()
    parts = Path(os.path.abspath(path)).parts if path.is_dir() else path.parts
    specific = next((part for part in reversed(parts) if not GENERIC_NAME.fullmatch(part)), "/")
    last = parts[-1]
    name = last if specific in (last, "/") else f"{specific}-{last}"
    return name.replace(":", "-")


@contextmanager
def export_temporarily(checkpoint: Path, parent: Path, dtype: str) -> Iterator[Path]:
    """Export a checkpoint to a temporary Hugging Face folder in `parent`, which is deleted at the end of the block.

    This process locks the folder. Unlocked folders, which killed processes have left behind, are deleted.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        own_folder = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
    except OSError as error:
        raise CheckpointError(
            f"{parent}: cannot hold the export of {checkpoint} ({error.strerror}); make it writable, free up space, or "
            "choose another folder"
        ) from None
    for left_folder in parent.glob(f"{EXPORT}*"):
        # OSError means that the folder is in use or has already been deleted.
        with suppress(OSError), (left_folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left_folder, ignore_errors=True)
    try:
        with (own_folder / LOCK).open("w") as lock:
            with suppress(OSError):  # if the file system does not support locks, no other process deletes this folder
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Other processes look for the final name, so the folder gets it only after it has been locked.
            own_folder = own_folder.rename(parent / own_folder.name.replace(MAKING, EXPORT))
            yield export_checkpoint(checkpoint, own_folder / "model", dtype=dtype, durable=False)
    finally:
        shutil.rmtree(own_folder, ignore_errors=True)
