"""Averages of the trained weights, such as exponential moving averages. Each rank keeps one shard in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param
from safetensors import safe_open
from torch import Tensor, nn

from dsreason.engine.engine import get_full_shape, is_partitioned
from dsreason.engine.host_memory import HostBuffer
from dsreason.engine.reference import (
    allocate_share_buffer,
    extract_shard,
    get_local_shares,
    get_trained_parameters,
    set_policy_aside,
)
from dsreason.errors import CheckpointError


class WeightAverage:
    """Average of the trained weights, initialised with the engine's weights.

    Each rank holds one shard of the average. Shards are always float32, because bfloat16 would lose small changes. All ranks
    must call the methods together.

    Args:
        policy_buffer: buffer from `allocate_share_buffer` that holds the policy while the engine uses the average. Averages and
            references may share a buffer if only one of them is in place at a time; None allocates a separate buffer.
    """

    def __init__(self, engine: DeepSpeedEngine, policy_buffer: HostBuffer | None = None) -> None:
        self.engine = engine
        self.shares = {name: share.float().to("cpu", copy=True) for name, share in iter_master_shares(engine)}
        self._policy = policy_buffer or allocate_share_buffer(engine)

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.shares.values())

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set average ← decay · average + (1 − decay) · trained weights; a decay of 0 copies the weights exactly."""
        for name, master in iter_master_shares(self.engine):
            if decay == 0:
                self.shares[name].copy_(master)
            else:
                self.shares[name].mul_(decay).add_(master.to("cpu", torch.float32), alpha=1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that makes the engine's forward passes use the average; do not train within it."""
        with set_policy_aside(self.engine, self._policy):
            for engine_share, share in zip(get_local_shares(self.engine), self.shares.values(), strict=True):
                engine_share.copy_(share)
            yield

    @torch.no_grad()
    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each trained parameter's name and full float32 average. All ranks must exhaust the iterator together."""
        for name, parameter in get_trained_parameters(self.engine).items():
            shape, share = get_full_shape(parameter), self.shares[name].to(self.engine.device)
            if is_partitioned(parameter):
                parts = share.new_empty(share.numel() * dist.get_world_size())
                dist.all_gather_into_tensor(parts, share)
                share = parts[: shape.numel()].view(shape)
            yield name, share

    def copy_shards(self) -> dict[str, Tensor]:
        """Return a copy of this rank's current shards, for a checkpoint."""
        return {name: share.clone() for name, share in self.shares.items()}

    def load(self, checkpoint: Path, label: str, saved_ranks: int) -> None:
        """Load the average from a checkpoint written by `saved_ranks` ranks. Raise CheckpointError if a file is missing."""
        rank = dist.get_rank()
        same_ranks = saved_ranks == dist.get_world_size()
        ranks = [rank] if same_ranks else range(saved_ranks)
        files = [checkpoint / get_average_file(label, saved_rank) for saved_rank in ranks]
        if missing := [file for file in files if not file.is_file()]:
            raise CheckpointError(f"{missing[0]} is missing; choose another checkpoint")
        for name, parameter in get_trained_parameters(self.engine).items():
            parts = [read_tensor(file, name) for file in files]
            self.shares[name].copy_(parts[0] if same_ranks else repartition(parameter, parts, rank))


def repartition(parameter: nn.Parameter, parts: list[Tensor], rank: int) -> Tensor:
    """Return this rank's shard of a parameter saved by a different number of ranks; `parts` has one part per saving rank."""
    if not is_partitioned(parameter):
        return parts[0]
    values = torch.cat([part.flatten() for part in parts])[: get_full_shape(parameter).numel()]
    return extract_shard(parameter, values, rank)


def read_saved_average(
    checkpoint: Path, label: str, shapes: Mapping[str, torch.Size], ranks: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full float32 average of each parameter in `shapes` from a checkpoint saved with ZeRO-3."""
    for name, shape in shapes.items():
        parts = [read_tensor(checkpoint / get_average_file(label, rank), name) for rank in range(ranks)]
        yield name, torch.cat([part.flatten() for part in parts])[: shape.numel()].view(shape)


def read_tensor(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
    except Exception as error:  # noqa: BLE001 (safetensors and file access raise various errors)
        raise CheckpointError(f"{file}: {name} cannot be read ({error}); choose another checkpoint") from error


def get_average_file(label: str, rank: int) -> str:
    """Return the name of the checkpoint file that contains a rank's shard, such as `average_ema_rank_0.safetensors`."""
    return f"average_{label}_rank_{rank}.safetensors"


def iter_master_shares(engine: DeepSpeedEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield each trained weight's name and this rank's flat float32 shard, which is the full weight at stages 1 and 2."""
    for name, parameter in get_trained_parameters(engine).items():
        partitioned = is_partitioned(parameter)
        yield name, safe_get_local_fp32_param(parameter) if partitioned else safe_get_full_fp32_param(parameter)
