"""Our positions where transformers' own `forward` and `generate` ask for some; the product always gives them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsreason.families import get_family
from dsreason.families.family import GridRule
from dsreason.models.mrope import IMAGE, VIDEO, compute_row_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def patch_positions(model: PreTrainedModel) -> None:
    model.model.get_rope_index = partial(batch_positions, get_family(model.config.model_type).grids, model.config)


def batch_positions(
    grid_rule: GridRule,
    config: Any,
    input_ids: Tensor,
    mm_token_type_ids: Tensor,
    attention_mask: Tensor | None = None,
    **mm_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute `get_rope_index` as a transformers model calls it: positions `[3, B, T]` and deltas `[B, 1]`.

    Rows may be padded left or right (position 0 there). Adding a delta to the number of tokens so far gives the
    position of the next token.
    """
    images, videos = grid_rule(mm_kwargs, config)
    runs = {IMAGE: iter(images), VIDEO: iter(videos)}
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = torch.zeros(3, *input_ids.shape, dtype=torch.int64, device=input_ids.device)
    deltas = []
    for row, remaining in enumerate(mask.bool()):
        part = compute_row_positions(mm_token_type_ids[row][remaining].tolist(), runs)
        positions[:, row, remaining] = part.to(input_ids.device)
        deltas.append(int(part.max()) + 1 - part.shape[1] if part.numel() else 0)
    return positions, torch.tensor(deltas, device=input_ids.device).unsqueeze(1)
