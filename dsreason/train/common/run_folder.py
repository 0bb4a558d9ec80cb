"""A run's output folder: its lock, the ranks that share it, and the checkpoint that the run continues from."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from dsreason.checkpoints.checkpoint import load_checkpoint
from dsreason.checkpoints.checkpoint_folder import (
    SavedAdapter,
    TrainerState,
    finish_interrupted,
    read_checkpoint,
    set_aside_newer,
)
from dsreason.checkpoints.selection import choose_sound
from dsreason.config.output import check_output_dir, find_run_record
from dsreason.config.schema import JobConfig
from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.lock import FolderLock
from dsreason.job.ranks import (
    World,
    broadcast_object,
    gather_objects,
    run_on_rank_zero,
    run_once_per_folder,
    share_errors,
)

log = logging.getLogger(__name__)

VISIBILITY_TIMEOUT_S = 3.0
"""Seconds to wait for a file created on another host to become visible; network file systems may delay it."""


def open_output_dir(
    output_dir: Path, config: JobConfig, resume: str | None, lock: FolderLock, world: World
) -> tuple[World, Path | None]:
    """Check and lock the run's output folder. Collective.

    Returns:
        The world, with the ranks that share the folder, and the checkpoint to continue from (None if there is none).
    """
    run_on_rank_zero(lambda: check_output_dir(output_dir, config, resume))
    world, checkpoints = find_folders(output_dir, world), output_dir / "checkpoints"

    def take_folder() -> None:
        check_output_dir(output_dir, config, resume)
        lock.take(output_dir)
        for recovered in finish_interrupted(checkpoints):
            log.warning("%s was fully written before the last job ended and has been recovered", recovered)

    run_once_per_folder(world, take_folder)
    if world.folder_ranks and world.is_main:
        log.warning(
            "%s is a separate folder on each host: each host keeps the checkpoints of its ranks, so the run can be resumed "
            "only on the same hosts with the same number of ranks; all other output is on the first host",
            output_dir,
        )
    checkpoint_targets = [str(target.address) for target in config.checkpoint.targets if "checkpoint" in target.include]
    if world.folder_ranks and checkpoint_targets:
        raise ConfigError(
            f"checkpoint.upload_include: no host has a complete checkpoint to upload to {' and '.join(checkpoint_targets)}, "
            f'because {output_dir} is a separate folder on each host; remove "checkpoint", or use an output folder that all '
            "hosts share"
        )
    checkpoint = choose_sound(checkpoints, resume, world)
    if checkpoint is None and resume is not None and world.is_main:
        log.warning("--resume auto: %s has no complete checkpoint; starting a new run", checkpoints)
    return world, checkpoint


def find_folders(output_dir: Path, world: World) -> World:
    """Create the output folder. Return the world with the ranks that share the folder: all ranks, or only those on this host.

    Raises:
        ConfigError: a host cannot create the folder; raised on every rank.
    """
    rank_mark = output_dir / f".seen_{broadcast_object(secrets.token_hex(4))}_{world.rank}"
    with share_errors():
        try:
            if world.local_rank == 0:
                output_dir.mkdir(parents=True, exist_ok=True)
                rank_mark.touch()
        except OSError as cause:
            host = socket.gethostname()
            raise ConfigError(f"{output_dir}: cannot be created on {host}: {cause}; choose another folder") from cause
    marks = [mark for mark in gather_objects(rank_mark if world.local_rank == 0 else None) if mark is not None]
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
        time.sleep(0.1)
    marks_by_rank = gather_objects([mark for mark in marks if mark.exists()])
    if world.local_rank == 0:
        rank_mark.unlink()
    if all(visible_marks == marks for visible_marks in marks_by_rank):
        return world
    return replace(
        world,
        folder_ranks=tuple(
            rank for rank, visible_marks in enumerate(marks_by_rank) if visible_marks == marks_by_rank[world.rank]
        ),
    )


def start_state(
    engine: DeepSpeedEngine,
    checkpoint: Path | None,
    config: JobConfig,
    model_path: Path,
    world: World,
    *,
    with_frozen: bool = True,
    adapter: SavedAdapter | None = None,
) -> TrainerState:
    """Load the checkpoint, if there is one, and return the state that the run starts with.

    Args:
        with_frozen: whether this run's checkpoints contain the weights that are not trained.
        adapter: description of this run's adapters; None if it trains none.

    Raises:
        CheckpointError: the run trains adapters, but the checkpoint has none, or its adapters belong to a different base model.
    """
    if checkpoint is None:
        return TrainerState(model_path=str(model_path.resolve()), adapter=adapter)
    if adapter is not None:
        run_on_rank_zero(lambda: check_base(checkpoint, adapter))
    state = load_checkpoint(engine, checkpoint, world, with_frozen=with_frozen)
    log.info("resumed from %s", checkpoint)
    run_checkpoints = Path(str(config.output_dir)) / "checkpoints"
    run_once_per_folder(world, lambda: set_aside_newer_checkpoints(run_checkpoints, checkpoint))
    if checkpoint.resolve().parent == run_checkpoints.resolve() and state.best_name == config.checkpoint.best_metric:
        return state
    # The best value so far was measured with a different metric, or its checkpoint is in another run's folder.
    return replace(state, best_metric=None, best_step=None)


def compare_rows(checkpoint: Path | None, current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of the rows that the run started with, and log a warning if the `current` digests differ.

    Comparing configurations would not reveal changes in the files themselves.
    """
    record = find_run_record(checkpoint.parent.parent) if checkpoint is not None else None
    recorded = record.get("rows") if record is not None else None
    original = {**current, **recorded} if isinstance(recorded, dict) else dict(current)
    for part, digest in current.items():
        if original[part] != digest:
            count = original[part].get("count") if isinstance(original[part], dict) else None
            difference = (
                f"{count} then, but {digest['count']} now"
                if count != digest["count"]
                else "the same number, but different content"
            )
            log.warning(
                "the %s rows differ from those that this run started with (%s), so its results will differ; restore the data, "
                "or start a new run from this run's export",
                *(part, difference),
            )
    return original


def check_base(checkpoint: Path, adapter: SavedAdapter) -> None:
    """Raise CheckpointError if the checkpoint has no adapters, or if its adapters were trained on a different base model."""
    saved = read_checkpoint(checkpoint).state.adapter
    if saved is None:
        raise CheckpointError(
            f"{checkpoint}: contains full model weights, but no adapters; resume it without lora.rank, or export it and "
            "set model.path to the export"
        )
    if saved.fingerprint != adapter.fingerprint:
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained on {describe_base(saved)}, but model.path is now "
            f"{describe_base(adapter)}, whose files differ; restore the base model, or choose another checkpoint"
        )
    if saved.quantize != adapter.quantize:
        saved_quantize, current_quantize = (
            f'"{adapter_state.quantize}"' if adapter_state.quantize else "unset" for adapter_state in (saved, adapter)
        )
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained on {saved.base} with model.quantize {saved_quantize}, but it is "
            f"now {current_quantize}, which changes the base weights; restore the old value, or choose another checkpoint"
        )


def describe_base(adapter: SavedAdapter) -> str:
    revision = f", revision {adapter.revision}" if adapter.revision else ""
    return f"{adapter.base} (fingerprint {adapter.fingerprint}{revision})"


def set_aside_newer_checkpoints(folder: Path, checkpoint: Path) -> None:
    """Rename the checkpoints in `folder` that are later than the resumed one, because their steps will be repeated."""
    for path in set_aside_newer(folder, checkpoint):
        log.warning("training continues from %s; a later checkpoint was renamed to %s", checkpoint, path)
