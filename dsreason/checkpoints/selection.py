"""Selection of the checkpoint from which a run continues, after a check of all its files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from dsreason.checkpoints.checkpoint_folder import (
    DAMAGED,
    choose_checkpoint,
    find_complete_checkpoints,
    find_unmarked,
    read_checkpoint,
    set_aside_damaged,
)
from dsreason.checkpoints.marker import MARKER, STATE_FILE, check_content, read_marker
from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.step_names import PREFIX, parse_step
from dsreason.job.ranks import World, gather_objects, run_on_rank_zero, run_once_per_folder, share_errors
from dsreason.problems import join_first

log = logging.getLogger(__name__)


def choose_sound(folder: Path, resume: str | None, world: World) -> Path | None:
    """Return the checkpoint that `--resume` selects, after comparing its files with their digests. Collective.

    With `auto`, damaged checkpoints are renamed to `damaged_step_N`, and the newest sound one is returned.

    Raises:
        CheckpointError: the checkpoint named by `resume`, or every checkpoint, is damaged; raised on every rank.
    """
    if resume != "auto":
        checkpoint = choose_common(folder, resume, world)
        if checkpoint is not None:
            check_together(checkpoint, world)
        return checkpoint
    run_once_per_folder(world, lambda: set_unmarked_aside(folder))
    while (checkpoint := choose_common(folder, resume, world)) is not None:
        try:
            check_together(checkpoint, world)
        except CheckpointError as error:
            run_once_per_folder(world, partial(set_damaged_aside, checkpoint, str(error)))
        else:
            return checkpoint
    run_once_per_folder(world, lambda: check_not_all_damaged(folder))
    return None


def check_together(path: Path, world: World) -> None:
    """Check all files of a checkpoint; each rank reads the files that it will load. Collective.

    Raises:
        CheckpointError: a file is missing or damaged; raised on every rank.
    """
    with share_errors():
        check_readable(path, [MARKER, STATE_FILE])
        read_checkpoint(path)
        marker = read_marker(path)
        names = [name for name in marker.sizes if is_checked_by(name, world)]
        check_readable(path, names)
        check_content(path, names)
    if marker.gaps and world.is_main:
        log.warning("%s: %s", path, marker.gaps)


def check_readable(path: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if one of the files exists but this user may not read it, because that must not count as damage."""
    for name in names:
        if os.access(path / name, os.F_OK) and not os.access(path / name, os.R_OK):
            raise ConfigError(f"{path / name}: this user may not read it; change its permissions")


def is_checked_by(name: str, world: World) -> bool:
    """Return whether this rank checks the checkpoint file `name`.

    Each rank checks the files that it will load, which are then in its host's page cache.
    """
    match = re.search(r"rank_([0-9]{1,9})", name)
    owner = int(match[1]) if match else 0
    return world.ranks_here[owner % len(world.ranks_here)] == world.rank


def set_unmarked_aside(folder: Path) -> None:
    for path in find_unmarked(folder):
        set_damaged_aside(path, f"{path / MARKER}: is missing")


def set_damaged_aside(path: Path, damage: str) -> None:
    log.warning("%s. The checkpoint was renamed to %s; --resume auto ignores it", damage, set_aside_damaged(path))


def check_not_all_damaged(folder: Path) -> None:
    """Raise CheckpointError if the folder has only damaged checkpoints, because the user may not want to start a new run."""
    damaged = sorted(path.name for path in folder.glob(f"{DAMAGED}{PREFIX}*"))
    if damaged and not find_complete_checkpoints(folder):
        raise CheckpointError(
            f"--resume auto: all checkpoints in {folder} are damaged ({join_first(damaged, 3, separator=', ')}; `dsreason "
            "checkpoint verify` names the files); restore the files and rename the folder, or delete it to start a new run"
        )


def choose_common(folder: Path, resume: str | None, world: World) -> Path | None:
    """Return the checkpoint that `--resume` selects; if hosts have separate folders, it is complete on all of them. Collective.

    If the selected checkpoint is incomplete on some host, the newest checkpoint that is complete on all hosts is returned
    instead, unless `resume` names a single checkpoint.

    Raises:
        CheckpointError: some hosts have checkpoints, but none is complete on all hosts.
    """
    checkpoint = run_on_rank_zero(lambda: choose_checkpoint(folder, resume))
    if not world.folder_ranks or resume is None:
        return checkpoint
    checkpoints = folder if checkpoint is None else checkpoint.parent
    complete = gather_objects([path.name for path in find_complete_checkpoints(checkpoints)])
    common = set(complete[0]).intersection(*complete)
    if not any(complete) or (checkpoint is not None and checkpoint.name in common):
        return checkpoint
    if not common or Path(resume).name.startswith(PREFIX):
        complete_steps = "; ".join(f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(complete))
        raise CheckpointError(
            f"--resume {resume}: each host has its own {checkpoints}, and no checkpoint to resume from is complete on all of "
            f"them ({complete_steps}); start on the hosts that wrote the checkpoints, or choose another --output-dir"
        )
    return max((checkpoints / name for name in common), key=parse_step)
