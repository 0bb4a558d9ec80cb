"""The reference policy: the weights that the KL is measured against, without a second model on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from dsreason.engine.engine import hf_name, is_partitioned
from dsreason.engine.host_memory import HostBuffer
from dsreason.errors import CheckpointError
from dsreason.models.weights import find_weights


class ReferencePolicy:
    """Keeps this rank's share of the trained weights in host memory, and puts it into the engine where it is needed.

    It begins as the policy that the engine holds when this is constructed. Frozen parameters are the policy's own. Every
    rank calls the methods together.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        own = self._own()
        nbytes, pinned = sum(share.nbytes for share in own), any(share.is_cuda for share in own)
        self._reference = HostBuffer(nbytes, pinned=pinned)
        self._policy = HostBuffer(nbytes, pinned=pinned)
        """Room for the policy while it is away."""
        self.become_policy()

    def become_policy(self) -> None:
        """The policy as it is now is the reference from here on."""
        self._reference.store(self._own())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the engine's forward is the reference's. Nothing may be trained there."""
        self.engine.empty_partition_cache()  # small parameters stay whole in between, and would be used as they are
        self._policy.store(self._own())
        self._reference.restore(self._own())
        try:
            yield
        finally:
            self.engine.empty_partition_cache()
            self._policy.restore(self._own())

    def load(self, folder: Path) -> None:
        """Take the weights of a Hugging Face folder. CheckpointError where one of them is missing."""
        weights = find_weights(folder, str)
        names = [name for name, _ in self._trained()]
        if missing := [name for name in names if name not in weights.places]:
            raise CheckpointError(f"{folder}: has no tensor {missing[0]}, which the reference policy needs")
        whole: dict[str, Tensor] = {}  # mapped from the files, so that a rank reads its own part only
        weights.read(names, whole.__setitem__)
        self._reference.store(self._share_of(p, whole[name]).to(p.dtype) for name, p in self._trained())

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((hf_name(name), p) for name, p in self.engine.module.named_parameters() if p.requires_grad)

    def _own(self) -> list[Tensor]:
        return [p.ds_tensor.data if is_partitioned(p) else p.data for _, p in self._trained()]

    def _share_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as ZeRO-3 cuts it: flat, equal parts, the last one padded."""
        if not is_partitioned(parameter):
            return whole
        size = parameter.ds_tensor.numel()
        part = whole.flatten()[self.engine.global_rank * size :][:size]
        return torch.nn.functional.pad(part, (0, size - part.numel()))
