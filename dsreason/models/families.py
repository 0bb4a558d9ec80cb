"""What differs between model families, one file each. Another family enters by a file and a line in `FAMILIES`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from dsreason.errors import CheckpointError
from dsreason.models import qwen2_5_vl, qwen3_vl

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PositionIds(Protocol):
    def __call__(self, mm_token_type_ids: Tensor, mm_kwargs: dict[str, Tensor], config: Any) -> Tensor:
        """`[T]` token types of one sample, its media and the model's configuration give positions `[3, T]`."""


@dataclass(frozen=True)
class Family:
    """Example: `FAMILIES["qwen3_vl"]`."""

    name: str
    """As people call it."""
    model_type: str
    """As `config.json` calls it."""
    position_ids: PositionIds
    """A plain function, to be pickled."""
    patch: Callable[[PreTrainedModel], None]
    """Makes a model's own `forward` and `generate` use the same positions, and its vision tower see a medium once."""
    vision_tower: str
    """Prefix of the vision tower's parameter names."""
    renames: tuple[tuple[str, str], ...]
    """(regular expression, replacement): names in published checkpoints → names in memory."""

    def rename(self, name: str) -> str:
        """The name in memory of a tensor in a checkpoint."""
        for pattern, replacement in self.renames:
            renamed, count = re.subn(pattern, replacement, name)
            if count:
                return renamed
        return name


FAMILIES = {
    "qwen2_5_vl": Family(
        name="Qwen2.5-VL",
        model_type="qwen2_5_vl",
        position_ids=qwen2_5_vl.position_ids,
        patch=qwen2_5_vl.patch,
        vision_tower=qwen2_5_vl.VISION_TOWER,
        renames=qwen2_5_vl.RENAMES,
    ),
    "qwen3_vl": Family(
        name="Qwen3-VL",
        model_type="qwen3_vl",
        position_ids=qwen3_vl.position_ids,
        patch=qwen3_vl.patch,
        vision_tower=qwen3_vl.VISION_TOWER,
        renames=qwen3_vl.RENAMES,
    ),
}


def family_of(model_type: str) -> Family:
    """The family of a `config.json`'s `model_type`; CheckpointError names the supported ones."""
    if model_type not in FAMILIES:
        supported = ", ".join(f"{family.name} ({key})" for key, family in FAMILIES.items())
        raise CheckpointError(f"model_type {model_type!r} is not supported; supported are {supported}")
    return FAMILIES[model_type]
