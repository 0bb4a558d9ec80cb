"""The reference policy: the weights that the KL is measured against, without a second model on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine
from safetensors import safe_open
from torch import Tensor, nn

from dsreason.errors import CheckpointError
from dsreason.runtime.engine import hf_name, is_partitioned


class ReferencePolicy:
    """Keeps this rank's share of the trained weights in host memory, and puts it into the engine where it is needed.

    It begins as the policy that the engine holds when this is constructed. Frozen parameters are the policy's own. Every
    rank calls the methods together.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        pinned = engine.device.type == "cuda"
        self.shares = {
            name: torch.empty_like(share, device="cpu", pin_memory=pinned) for name, share in self._own().items()
        }
        self._spare = {name: torch.empty_like(share, pin_memory=pinned) for name, share in self.shares.items()}
        self.become_policy()

    @property
    def gib(self) -> float:
        """Host memory of this rank: the reference, and room for the policy while it is away."""
        return 2 * sum(share.nbytes for share in self.shares.values()) / 2**30

    def become_policy(self) -> None:
        """The policy as it is now is the reference from here on."""
        for name, share in self._own().items():
            self.shares[name].copy_(share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the engine's forward is the reference's. Nothing may be trained there."""
        self._exchange(keep=self._spare, bring=self.shares)
        try:
            yield
        finally:
            self._exchange(keep=None, bring=self._spare)

    @torch.no_grad()
    def _exchange(self, *, keep: dict[str, Tensor] | None, bring: dict[str, Tensor]) -> None:
        self.engine.empty_partition_cache()  # small parameters stay whole in between, and would be used as they are
        for name, share in self._own().items():
            if keep is not None:
                keep[name].copy_(share)
            share.copy_(bring[name])

    def load(self, folder: Path) -> None:
        """Take the weights of a Hugging Face folder. CheckpointError where one of them is missing."""
        files = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
        for name, parameter in self._trained():
            if hf_name(name) not in files:
                raise CheckpointError(f"{folder}: has no tensor {hf_name(name)}, which the reference policy needs")
            with safe_open(files[hf_name(name)], "pt") as tensors:
                self.shares[name].copy_(self._share_of(parameter, tensors.get_tensor(hf_name(name))))

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.engine.module.named_parameters() if p.requires_grad)

    def _own(self) -> dict[str, Tensor]:
        return {name: p.ds_tensor.data if is_partitioned(p) else p.data for name, p in self._trained()}

    def _share_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as ZeRO-3 cuts it: flat, equal parts, the last one padded."""
        if not is_partitioned(parameter):
            return whole
        size = parameter.ds_tensor.numel()
        part = whole.flatten()[self.engine.global_rank * size :][:size]
        return torch.nn.functional.pad(part, (0, size - part.numel()))
