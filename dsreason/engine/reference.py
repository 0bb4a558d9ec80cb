"""Reference policy for the KL term, without a second model on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from dsreason.engine.engine import is_partitioned, to_hf_name
from dsreason.engine.host_memory import HostBuffer
from dsreason.engine.zero3 import release_gathered
from dsreason.errors import CheckpointError
from dsreason.models.lora import disable_adapters
from dsreason.models.weights import find_weights


class KLReference(Protocol):
    """Interface for a reference policy, to which the KL is measured."""

    def in_place(self) -> AbstractContextManager[None]:
        """Context manager that makes forward passes use the reference's weights; do not train within it.

        All ranks must enter and leave it together.
        """


class BaseReference:
    """Reference for a policy with adapters: the model without them, which needs no extra memory and never changes."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def in_place(self) -> AbstractContextManager[None]:
        return disable_adapters(self.engine.module)


class ReferencePolicy:
    """Reference whose trained weights are kept in host memory, sharded across the ranks, and copied to the engine on demand.

    At construction, the reference equals the engine's policy. The two share their frozen parameters. All ranks must call the
    methods together.

    Args:
        policy_buffer: buffer from `allocate_share_buffer` that holds the policy while the engine uses the reference. Averages and
            references may share a buffer if only one of them is in place at a time; None allocates a separate buffer.
    """

    def __init__(self, engine: DeepSpeedEngine, policy_buffer: HostBuffer | None = None) -> None:
        self.engine = engine
        self._reference, self._policy = allocate_share_buffer(engine), policy_buffer or allocate_share_buffer(engine)
        self.update_to_policy()

    def update_to_policy(self) -> None:
        """Set the reference to the current policy."""
        self._reference.store(get_local_shares(self.engine))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that makes the engine's forward passes use the reference's weights; do not train within it."""
        with set_policy_aside(self.engine, self._policy):
            self._reference.restore(get_local_shares(self.engine))
            yield

    def load(self, folder: Path, rename: Callable[[str], str | None] = str) -> None:
        """Load weights from a Hugging Face folder; `rename` maps tensor names. Raise CheckpointError if a weight is missing."""
        weights = find_weights(folder, rename)
        trained = get_trained_parameters(self.engine)
        if missing := [name for name in trained if name not in weights.places]:
            raise CheckpointError(f"{folder}: the tensor {missing[0]}, which the reference policy needs, is missing")
        tensors: dict[str, Tensor] = {}  # memory-mapped, so that each rank reads only its shard
        weights.read(list(trained), tensors.__setitem__)
        rank = self.engine.global_rank
        self._reference.store(extract_shard(p, tensors[name], rank).to(p.dtype) for name, p in trained.items())


def get_trained_parameters(engine: DeepSpeedEngine) -> dict[str, nn.Parameter]:
    return {to_hf_name(name): p for name, p in engine.module.named_parameters() if p.requires_grad}


def get_local_shares(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return this rank's shard of each trained weight. The shards are views: writing to a shard changes the engine's weight."""
    parameters: Iterable[nn.Parameter] = get_trained_parameters(engine).values()
    return [p.ds_tensor.data if is_partitioned(p) else p.data for p in parameters]


def extract_shard(parameter: nn.Parameter, whole: Tensor, rank: int) -> Tensor:
    """Return a rank's shard of a full tensor. ZeRO-3 flattens the tensor and splits it into equal parts, the last one padded."""
    if not is_partitioned(parameter):
        return whole
    size = parameter.ds_tensor.numel()
    part = whole.flatten()[rank * size :][:size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def allocate_share_buffer(engine: DeepSpeedEngine) -> HostBuffer:
    shares = get_local_shares(engine)
    return HostBuffer(sum(share.nbytes for share in shares), pinned=any(share.is_cuda for share in shares))


@contextmanager
def set_policy_aside(engine: DeepSpeedEngine, policy_buffer: HostBuffer) -> Iterator[None]:
    """Context manager that saves the policy's trained weights, which the block may overwrite, and restores them on exit."""
    assert not policy_buffer.taken, "the buffer still holds another policy's weights, which would be overwritten"
    drop_gathered(engine)
    policy_buffer.store(get_local_shares(engine))
    policy_buffer.taken = True
    try:
        yield
    finally:
        drop_gathered(engine)
        policy_buffer.restore(get_local_shares(engine))
        policy_buffer.taken = False


def drop_gathered(engine: DeepSpeedEngine) -> None:
    """Release gathered weights, so that the next forward pass gathers every trained weight from the ranks' shards again."""
    release_gathered(engine)  # small parameters stay gathered between passes, which would then use old values
    for parameter in get_trained_parameters(engine).values():
        if is_partitioned(parameter):
            parameter.ds_secondary_tensor = None  # the per-host copy, which exists with zero_hpz_partition_size
