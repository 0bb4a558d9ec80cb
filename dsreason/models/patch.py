"""What a transformers model does otherwise here: it numbers positions as vLLM does, and sees a repeated medium once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsreason.families import Family
from dsreason.models import media_once, mrope

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def patch(model: PreTrainedModel, family: Family) -> None:
    """For this one model object: its own `forward` and `generate` use our positions, its vision tower sees a medium once."""
    mrope.install(model, family.grids)
    media_once.install(model.get_submodule(family.modules.vision_tower))
