"""Changes to a transformers model: positions are numbered as by vLLM, and a repeated medium is encoded once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dsreason.families import Family
from dsreason.models.mrope import batch_positions
from dsreason.models.shared_media import SharedMediaForward

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def patch(model: PreTrainedModel, family: Family) -> None:
    """For this one model object: its own `forward` and `generate` use our positions, its vision tower sees a medium once."""
    model.model.get_rope_index = partial(batch_positions, family.grids, model.config)
    vision_tower = model.get_submodule(family.modules.vision_tower)
    vision_tower.forward = SharedMediaForward(vision_tower.forward)
