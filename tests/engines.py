"""Calls that tests make on an engine; all ranks make them together."""

from __future__ import annotations

from pathlib import Path

from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import TrainerState
from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
from dsreason.job.ranks import World


def full_gradients(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Averaged float32 gradients on the CPU, between the last `backward` of a step and its `step`."""
    return {
        name: safe_get_full_grad(parameter).float().cpu().clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def save_checkpoint(
    engine: DeepSpeedEngine, folder: Path, step: int, state: TrainerState, world: World, *, with_frozen: bool = True
) -> Path:
    """Write `<folder>/step_<step>`, and return it once it is complete."""
    writer = CheckpointWriter(engine, folder, world, background=False, with_frozen=with_frozen)
    writer.start(step, state)
    writer.wait()
    writer.close()
    return folder / f"step_{step}"
