"""Resetting the reference policy, and loading the latest reference in a resumed run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from dsreason.checkpoints.checkpoint_folder import (
    delete_folder,
    find_complete_checkpoints,
    find_unfinished_steps,
)
from dsreason.checkpoints.export import export_engine
from dsreason.checkpoints.export_digests import check_digests
from dsreason.checkpoints.export_folder import write_folder_atomically
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.engine.reference import ReferencePolicy
from dsreason.errors import CheckpointError
from dsreason.families import get_family
from dsreason.files.disk import check_links, remove
from dsreason.files.step_names import format_step, parse_step
from dsreason.job.ranks import World, run_on_rank_zero

log = logging.getLogger(__name__)


def find_reference_step(step: int, every: int) -> int:
    """Return the step whose policy serves as the reference after `step`; 0 means the initial model.

    Example: with `every` = 100, step 250 → 200.
    """
    return step // every * every if every else 0


def reset_reference(
    reference: ReferencePolicy, config: GRPOConfig, step: int, output_dir: Path, model_path: Path, world: World
) -> None:
    """If a reset is due, make the current policy the reference and save it for resumed runs. Collective."""
    every = config.grpo.reference_reset_every
    if not every or step % every:
        return
    reference.update_to_policy()
    folder = output_dir / "reference" / format_step(step)
    run_on_rank_zero(lambda: delete_folder(folder))
    export_engine(reference.engine, model_path, folder, world, dtype=config.train.precision)
    run_on_rank_zero(lambda: delete_unneeded(output_dir, every, step))
    log.info("step %d: reset the reference to the current policy", step)


def delete_unneeded(output_dir: Path, every: int, step: int) -> None:
    """Delete references needed neither by the run nor by a checkpoint, whether that is complete or still being written."""
    checkpoints = output_dir / "checkpoints"
    steps = [step, *map(parse_step, find_complete_checkpoints(checkpoints)), *find_unfinished_steps(checkpoints)]
    needed = {format_step(find_reference_step(used_step, every)) for used_step in steps}
    for folder in (output_dir / "reference").iterdir():
        if folder.name not in needed:
            delete_folder(folder)


def load_reference(reference: ReferencePolicy, config: GRPOConfig, checkpoint: Path, output_dir: Path) -> None:
    """Load the reference that was in use at a checkpoint.

    Before the first reset, the reference is the initial model, which is already loaded.

    Raises:
        CheckpointError: the reference is missing from the run that saved the checkpoint.
    """
    step = find_reference_step(parse_step(checkpoint), config.grpo.reference_reset_every)
    if step == 0:
        return
    folder = checkpoint.resolve().parent.parent / "reference" / format_step(step)
    if not folder.is_dir():
        raise CheckpointError(
            f"{checkpoint}: its reference policy {folder} is missing (grpo.reference_reset_every = "
            f"{config.grpo.reference_reset_every}); copy it there, or choose another checkpoint"
        )
    run_on_rank_zero(lambda: check_digests(folder))
    reference.load(folder, get_family(reference.engine.module.model.config.model_type).rename)
    saved_folder = output_dir / "reference" / folder.name
    if saved_folder.resolve() != folder:

        def copy() -> None:
            check_links(folder)
            remove(saved_folder)
            with write_folder_atomically(saved_folder) as draft:
                shutil.copytree(folder, draft, dirs_exist_ok=True)

        run_on_rank_zero(copy)
