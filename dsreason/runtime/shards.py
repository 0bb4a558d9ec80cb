"""What DeepSpeed writes for each rank, read without running pickled code and without a model."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from dsreason.errors import CheckpointError
from dsreason.runtime.engine import hf_name

UNREADABLE = (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, AssertionError)


@contextlib.contextmanager
def safe_loading() -> Iterator[None]:
    """Let DeepSpeed's `torch.load` calls read tensors and plain values only, never run pickled code."""
    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        with torch.serialization.safe_globals([ZeroStageEnum, LossScaler, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def checkpoint_tensors(checkpoint: Path, saved: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint, whole, in the model's order: float32 where trained, else as it was loaded."""
    ranks = range(saved["world_size"])
    states = [load_optimizer_file(checkpoint, rank)["optimizer_state_dict"] for rank in ranks]
    if saved["zero_stage"] == 3:
        models = [load_model_file(checkpoint, rank, 3) for rank in ranks]
        trained = trained_slices_stage3(states, models[0]["param_shapes"])
        frozen = {name: [model["frozen_param_fragments"][name] for model in models] for name in untrained(saved)}
    else:
        model = load_model_file(checkpoint, 0, saved["zero_stage"])
        trained = trained_slices_stage2(states)
        frozen = {name: [model["module"][name]] for name in untrained(saved)}
    slices = trained | frozen
    for name, described in saved["parameters"].items():
        if name not in slices:
            raise CheckpointError(f"{checkpoint}: {name} is not in the checkpoint; choose another one")
        yield hf_name(name), assemble(slices[name], torch.Size(described["shape"]))


def untrained(saved: dict[str, Any]) -> list[str]:
    return [name for name, described in saved["parameters"].items() if not described["trained"]]


def assemble(slices: list[Tensor], shape: torch.Size) -> Tensor:
    """Rank by rank, without the padding at the end."""
    return torch.cat([piece.reshape(-1) for piece in slices])[: shape.numel()].view(shape)


def trained_slices_stage3(states: list[Any], groups: list[dict[str, torch.Size]]) -> dict[str, list[Tensor]]:
    """ZeRO-3 cuts every parameter into equal parts, the last one padded, and lays a group's parts end to end."""
    result: dict[str, list[Tensor]] = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            part = -(-torch.Size(shape).numel() // len(states))
            result[name] = [state["fp32_flat_groups"][group].narrow(0, offset, part) for state in states]
            offset += part
    return result


def trained_slices_stage2(states: list[Any]) -> dict[str, list[Tensor]]:
    """ZeRO-1 and 2 cut a whole group; each rank notes which stretch of its part belongs to which parameter."""
    result: dict[str, list[Tensor]] = {}
    for state in states:
        for flat, mapping in zip(
            state["single_partition_of_fp32_groups"],
            state["param_slice_mappings"],
            strict=True,
        ):
            for name, stretch in mapping.items():
                result.setdefault(name, []).append(flat.narrow(0, stretch.start, stretch.numel))
    return result


def load_optimizer_file(checkpoint: Path, rank: int) -> dict[str, Any]:
    """Float32 weights and optimizer states of one rank."""
    return load_file(checkpoint, f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def load_model_file(checkpoint: Path, rank: int, zero_stage: int) -> dict[str, Any]:
    """Shapes and frozen weights: one file a rank under ZeRO-3, else one for all."""
    return load_file(checkpoint, f"{f'zero_pp_rank_{rank}_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt")


def load_file(checkpoint: Path, pattern: str) -> dict[str, Any]:
    """A file with its tensors left on disk until they are touched."""
    found = sorted(checkpoint.glob(pattern))
    if not found:
        raise CheckpointError(f"{checkpoint / pattern}: is missing; choose another checkpoint")
    try:
        with safe_loading():
            return torch.load(found[0], map_location="cpu", mmap=True, weights_only=True)
    except UNREADABLE as cause:
        raise CheckpointError(f"{found[0]}: cannot be read ({cause}); choose another checkpoint") from cause
