"""Readers for the files that DeepSpeed writes for each rank. They need no model and never run pickled code."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors import SafetensorError
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import SavedRun, check_written
from dsreason.engine.engine import to_hf_name
from dsreason.errors import CheckpointError
from dsreason.job.launch import set_variables

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNREADABLE = (
    *(OSError, RuntimeError, pickle.UnpicklingError, SafetensorError, EOFError, struct.error, AssertionError),
    *(LookupError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError),
)
"""Exceptions that may be raised if a file is damaged or not part of a checkpoint."""


@contextlib.contextmanager
def load_safely() -> Iterator[None]:
    """Restrict DeepSpeed's `torch.load` calls to tensors and plain values, so that they never run pickled code."""
    with (
        set_variables({"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}),
        torch.serialization.safe_globals([ZeroStageEnum, LossScaler, fragment_address]),
    ):
        yield


def iter_checkpoint_tensors(
    checkpoint: Path, saved: SavedRun, *, with_frozen: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter in a checkpoint, unsharded and in the model's order; trained parameters are float32.

    Args:
        with_frozen: whether to include frozen parameters, which some checkpoints do not contain.

    Raises:
        CheckpointError: a rank's file is missing, damaged, or from a different run.
    """
    ranks = range(saved.world_size)
    if len(saved.stored_ranks) < len(ranks):
        check_written(
            checkpoint, len(ranks), ranks, "copy the files from the same folder on the other hosts into this one"
        )
    with convert_read_errors(checkpoint):
        for name, pieces, shape in iter_sliced_tensors(checkpoint, saved, with_frozen=with_frozen):
            yield to_hf_name(name), assemble(pieces, shape)


@contextlib.contextmanager
def convert_read_errors(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as cause:
        raise CheckpointError(
            f"{checkpoint}: its files are inconsistent ({type(cause).__name__}: {cause}); choose another checkpoint"
        ) from cause


def iter_sliced_tensors(
    checkpoint: Path, saved: SavedRun, *, with_frozen: bool = True
) -> Iterator[tuple[str, list[Tensor], torch.Size]]:
    """Yield (name, parts ordered by rank, shape) for every parameter."""
    ranks = range(saved.world_size)
    untrained_names = find_untrained(saved) if with_frozen else []
    states = [load_optimizer_file(checkpoint, rank)["optimizer_state_dict"] for rank in ranks]
    if saved.zero_stage == 3:
        models = [load_model_file(checkpoint, rank, 3) for rank in ranks]
        trained = slice_stage3(states, models[0]["param_shapes"])
        frozen = {name: [model["frozen_param_fragments"][name] for model in models] for name in untrained_names}
    else:
        model = load_model_file(checkpoint, 0, saved.zero_stage)
        trained = slice_stage2(states)
        frozen = {name: [model["module"][name]] for name in untrained_names}
    slices = trained | frozen
    for name, described in saved.parameters.items():
        if not (described.trained or with_frozen):
            continue
        if name not in slices:
            raise CheckpointError(f"{checkpoint}: parameter {name} is missing; choose another checkpoint")
        yield name, slices[name], torch.Size(described.shape)


def check_names(checkpoint: Path, saved: SavedRun) -> None:
    """Raise CheckpointError if a rank's files contain parameters that trainer_state.json does not list.

    Call this before DeepSpeed's converter, which creates a folder for each name: a name such as `../../x` would lead outside the
    checkpoint.
    """
    if (num_files := len(list(checkpoint.glob("*_optim_states.pt")))) != saved.world_size:
        raise CheckpointError(
            f"{checkpoint}: contains *_optim_states.pt files of {num_files} ranks, but was written by {saved.world_size} ranks; "
            "move the files of other checkpoints away"
        )
    for rank in range(saved.world_size):
        with convert_read_errors(checkpoint):
            model = load_model_file(checkpoint, rank, saved.zero_stage)
            shapes = [*(model.get("param_shapes") or []), model.get("frozen_param_shapes") or {}]
            mappings = load_optimizer_file(checkpoint, rank)["optimizer_state_dict"].get("param_slice_mappings", [])
            names = {name for mapping in (*shapes, *mappings) for name in mapping}
            foreign = sorted(names - saved.parameters.keys())
        if foreign:
            raise CheckpointError(
                f"{checkpoint}: the files of rank {rank} contain {foreign[0]!r}, which is not one of the "
                f"{len(saved.parameters)} parameters in trainer_state.json; choose another checkpoint"
            )


def find_untrained(saved: SavedRun) -> list[str]:
    return [name for name, described in saved.parameters.items() if not described.trained]


def assemble(slices: list[Tensor], shape: torch.Size) -> Tensor:
    """Join a parameter's parts and drop the padding; raise ValueError if a part is larger than its storage in the file."""
    if any(piece.nbytes > piece.untyped_storage().nbytes() for piece in slices):
        raise ValueError(f"parts of a parameter of shape {list(shape)} are larger than their storage")
    return torch.cat([piece.reshape(-1) for piece in slices])[: shape.numel()].view(shape)


def slice_stage3(states: list[Any], groups: list[dict[str, torch.Size]]) -> dict[str, list[Tensor]]:
    """Return each parameter's parts. ZeRO-3 pads and splits each parameter equally, and concatenates the parts per group."""
    result: dict[str, list[Tensor]] = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            part = -(-torch.Size(shape).numel() // len(states))
            result[name] = [state["fp32_flat_groups"][group].narrow(0, offset, part) for state in states]
            offset += part
    return result


def slice_stage2(states: list[Any]) -> dict[str, list[Tensor]]:
    """Return each parameter's parts. ZeRO-1 and ZeRO-2 split entire groups, and each rank stores the parameters' ranges."""
    result: dict[str, list[Tensor]] = {}
    for state in states:
        groups = zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True)
        for flat, mapping in groups:
            for name, stretch in mapping.items():
                result.setdefault(name, []).append(flat.narrow(0, stretch.start, stretch.numel))
    return result


def load_optimizer_file(checkpoint: Path, rank: int) -> dict[str, Any]:
    """Load the file with a rank's float32 weights and optimizer states."""
    return load_file(checkpoint, f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def load_model_file(checkpoint: Path, rank: int, zero_stage: int) -> dict[str, Any]:
    """Load the file with shapes and frozen weights. ZeRO-3 has one per rank; other stages have a single one."""
    return load_file(checkpoint, f"{f'zero_pp_rank_{rank}_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt")


def load_file(checkpoint: Path, pattern: str) -> dict[str, Any]:
    """Load the only file that matches `pattern`; its tensors stay on disk until they are accessed."""
    files = sorted(checkpoint.glob(pattern))
    if not files:
        raise CheckpointError(f"{checkpoint / pattern}: is missing; choose another checkpoint")
    if len(files) > 1:
        raise CheckpointError(
            f"{files[0]} and {files[1].name} both match {pattern}; move away the one that belongs to another checkpoint"
        )
    try:
        check_stored(files[0])
        with load_safely():
            loaded = torch.load(files[0], map_location="cpu", mmap=True, weights_only=True)
    except (*UNREADABLE, BadZipFile) as cause:
        raise CheckpointError(f"{files[0]}: cannot be read ({cause}); choose another checkpoint") from cause
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{files[0]}: must contain a dict; got a {type(loaded).__name__}; choose another checkpoint"
        )
    return loaded


def check_stored(file: Path) -> None:
    """Raise ValueError if the file has compressed entries, which torch never writes and which may expand to any size."""
    with ZipFile(file) as archive:
        if packed := [part.filename for part in archive.infolist() if part.compress_type != ZIP_STORED]:
            raise ValueError(f"its entry {packed[0]:.80} is compressed")
