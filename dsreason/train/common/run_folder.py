"""The output folder of a run: whose it is, who sees it, and which of its checkpoints the run goes on from."""

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

from dsreason.checkpoints.checkpoint import choose_common, load_checkpoint
from dsreason.checkpoints.checkpoint_folder import (
    SavedAdapter,
    TrainerState,
    read_checkpoint,
    recover,
    set_aside_newer,
)
from dsreason.config.output import check_output_dir, run_record
from dsreason.config.schema import JobConfig
from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.lock import FolderLock
from dsreason.job.ranks import (
    World,
    broadcast_object,
    errors_on_all_ranks,
    gather_objects,
    on_one_rank_per_folder,
    on_rank_zero,
)

log = logging.getLogger(__name__)

VISIBILITY_TIMEOUT_S = 3.0
"""After which a new file of another host is not coming: network file systems may show it late."""


def open_output_dir(
    output_dir: Path, config: JobConfig, resume: str | None, lock: FolderLock, world: World
) -> tuple[World, Path | None]:
    """Check and lock the folder of the run; returns the world with who shares it, and the checkpoint to continue from.

    Collective.
    """
    on_rank_zero(lambda: check_output_dir(output_dir, config, resume))
    world, checkpoints = find_folders(output_dir, world), output_dir / "checkpoints"

    def take() -> None:
        check_output_dir(output_dir, config, resume)
        lock.take(output_dir)
        for recovered in recover(checkpoints):
            log.warning("%s was written whole before the last job ended", recovered)

    on_one_rank_per_folder(world, take)
    if world.folder_ranks and world.is_main:
        log.warning(
            "%s is another folder on every host: each keeps the checkpoints of its own ranks, and the run can be resumed on "
            "the same hosts only, with as many ranks; all else is on the first host",
            output_dir,
        )
    checkpoint_targets = [str(target.address) for target in config.checkpoint.targets if "checkpoint" in target.include]
    if world.folder_ranks and checkpoint_targets:
        raise ConfigError(
            f"checkpoint.upload_include: no host has a whole checkpoint to upload to {' and '.join(checkpoint_targets)} in "
            f'its own {output_dir}; leave "checkpoint" out, or give a folder that all hosts share'
        )
    checkpoint = choose_common(checkpoints, resume, world)
    if checkpoint is None and resume is not None and world.is_main:
        log.warning("--resume auto: no complete checkpoint in %s, starting fresh", checkpoints)
    return world, checkpoint


def find_folders(output_dir: Path, world: World) -> World:
    """The world, and who sees this rank's output folder, which is made: all ranks, or each host has one of its own.

    ConfigError on every rank where a host cannot make it.
    """
    own_mark = output_dir / f".seen_{broadcast_object(secrets.token_hex(4))}_{world.rank}"
    with errors_on_all_ranks():
        try:
            if world.local_rank == 0:
                output_dir.mkdir(parents=True, exist_ok=True)
                own_mark.touch()
        except OSError as cause:
            host = socket.gethostname()
            raise ConfigError(f"{output_dir}: cannot be made on {host}: {cause}; choose another") from cause
    marks = [mark for mark in gather_objects(own_mark if world.local_rank == 0 else None) if mark is not None]
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen_marks = gather_objects([mark for mark in marks if mark.exists()])
    if world.local_rank == 0:
        own_mark.unlink()
    if all(rank_marks == marks for rank_marks in seen_marks):
        return world
    return replace(
        world,
        folder_ranks=tuple(rank for rank, rank_marks in enumerate(seen_marks) if rank_marks == seen_marks[world.rank]),
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
    """Where the run starts: at its beginning, or where the checkpoint that is loaded here left it.

    Args:
        with_frozen: whether checkpoints of this run hold the weights that are not trained.
        adapter: of this run's adapters. A checkpoint of others, or of another base model, is a CheckpointError.
    """
    if checkpoint is None:
        return TrainerState(model_path=str(model_path.resolve()), adapter=adapter)
    if adapter is not None:
        on_rank_zero(lambda: check_base(checkpoint, adapter))
    state = load_checkpoint(engine, checkpoint, world, with_frozen=with_frozen)
    log.info("resumed from %s", checkpoint)
    own_checkpoints = Path(str(config.output_dir)) / "checkpoints"
    on_one_rank_per_folder(world, lambda: set_newer_aside(own_checkpoints, checkpoint))
    if checkpoint.resolve().parent == own_checkpoints.resolve() and state.best_name == config.checkpoint.best_metric:
        return state
    # The best so far is another metric's, or its checkpoint lies in another run's folder.
    return replace(state, best_metric=None, best_step=None)


def compare_rows(checkpoint: Path | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of the rows that the run began with; a warning where those of now differ, which no key of its configuration
    tells."""
    record = run_record(checkpoint.parent.parent) if checkpoint is not None else None
    then = record.get("rows") if record is not None else None
    began = {**now, **then} if isinstance(then, dict) else dict(now)
    for part, current in now.items():
        if began[part] != current:
            count = began[part].get("count") if isinstance(began[part], dict) else None
            difference = (
                f"{count} then, {current['count']} now" if count != current["count"] else "as many, with other content"
            )
            log.warning(
                "the %s rows are not those that this run began with (%s): it does not end as it would have; put the data back, "
                "or begin a new run from its export",
                *(part, difference),
            )
    return began


def check_base(checkpoint: Path, adapter: SavedAdapter) -> None:
    """Raise CheckpointError if the adapters of a checkpoint were trained on another model than this run's."""
    saved = read_checkpoint(checkpoint).state.adapter
    if saved is None:
        raise CheckpointError(
            f"{checkpoint}: holds all weights of a model, no adapters; resume it without lora.rank, or export it and set "
            "model.path to the export"
        )
    if saved.fingerprint != adapter.fingerprint:
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained on {described(saved)}; model.path is now {described(adapter)}, which has "
            "other files; put the base model back, or choose another checkpoint"
        )
    if saved.quantize != adapter.quantize:
        then, now = (
            f'"{adapter_state.quantize}"' if adapter_state.quantize else "unset" for adapter_state in (saved, adapter)
        )
        raise CheckpointError(
            f"{checkpoint}: its adapters were trained on {saved.base} with model.quantize {then}, which is {now} now and makes "
            "other weights of the same files; set it as it was, or choose another checkpoint"
        )


def described(adapter: SavedAdapter) -> str:
    revision = f", revision {adapter.revision}" if adapter.revision else ""
    return f"{adapter.base} (fingerprint {adapter.fingerprint}{revision})"


def set_newer_aside(folder: Path, checkpoint: Path) -> None:
    """The folder's checkpoints after the resumed step belong to steps that are now trained again."""
    for path in set_aside_newer(folder, checkpoint):
        log.warning("training goes on from %s; a later checkpoint is now called %s", checkpoint, path)
