"""Multimodal rotary positions (mRoPE): each token has a temporal, a height and a width index.

These positions replace those of transformers, because a model must be trained with the positions that are used to serve it. In
transformers 5.19, the positions of text after a Qwen2.5-VL video depend only on the video's spatial extent. In this module, as in
the models' original code and vLLM, text after an image or video continues from the largest index on any axis, plus 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.families.family import Grid, GridRule

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Values of `mm_token_type_ids`."""


def compute_position_ids(
    grid_rule: GridRule, mm_token_type_ids: Tensor, mm_kwargs: dict[str, Tensor], config: Any
) -> Tensor:
    """Compute the positions `[3, T]` of a sample.

    A text token has the same index on all axes. The indices of a grid start after the preceding text, and the text after the grid
    continues from the largest index on any axis, plus 1.

    Source: `get_mrope_input_positions` in vLLM's qwen2_5_vl.py and qwen3_vl.py, which follow the rule of the models'
    original code. `mm_token_type_ids` `[T]` (0 text, 1 image, 2 video) and `mm_kwargs` belong to the sample; `config` is the
    model's configuration, which `grid_rule` reads.

    Raises:
        DataError: the placeholders do not match the media.
    """
    images, videos = grid_rule(mm_kwargs, config)
    runs = {IMAGE: iter(images), VIDEO: iter(videos)}
    positions = compute_row_positions(mm_token_type_ids.tolist(), runs)
    unused = {IMAGE: len(list(runs[IMAGE])), VIDEO: len(list(runs[VIDEO]))}
    if any(unused.values()):
        raise DataError(
            f"{unused[IMAGE]} image and {unused[VIDEO]} video grids have no placeholder tokens in the sample; "
            "add one placeholder per image or video to the text"
        )
    return positions.to(mm_token_type_ids.device)


def compute_grid_positions(grid: Grid) -> Tensor:
    """Compute the positions `[3, frames * height * width]` of a grid, starting at 0. Float64 times are truncated, as in vLLM."""
    time = (torch.arange(grid.frames, dtype=torch.float64) * grid.time_step).long()
    axes = torch.meshgrid(time, torch.arange(grid.height), torch.arange(grid.width), indexing="ij")
    return torch.stack(axes).flatten(1)


def compute_row_positions(types: list[int], runs: dict[int, Iterator[Grid]]) -> Tensor:
    """Compute the positions `[3, T]` of an unpadded sample, and consume the sample's grids from `runs`."""
    parts, start, index = [torch.empty(3, 0, dtype=torch.int64)], 0, 0
    while index < len(types):
        kind = types[index]
        if kind == TEXT:
            length = sum(1 for _ in takewhile(lambda t: t == TEXT, types[index:]))
            part = torch.arange(length).expand(3, -1)
        else:
            part = compute_grid_positions(take_next_grid(types, index, runs))
        parts.append(part + start)
        start = int(parts[-1].max()) + 1
        index += part.shape[1]
    return torch.cat(parts, dim=1)


def take_next_grid(types: list[int], index: int, runs: dict[int, Iterator[Grid]]) -> Grid:
    kind = types[index]
    name = "image" if kind == IMAGE else "video"
    grid = next(runs[kind], None)
    if grid is None:
        raise DataError(
            f"token {index} is a placeholder without its {name}; remove the model's placeholder tokens from the text, because "
            "only media items may add them"
        )
    length = grid.frames * grid.height * grid.width
    num_placeholders = sum(1 for t in types[index : index + length] if t == kind)
    if length == 0 or num_placeholders != length:
        raise DataError(
            f"the {name} at token {index} has {length} tokens ({grid.frames} x {grid.height} x {grid.width}), "
            f"but the text has {num_placeholders} placeholders there; encode text and media with the same processor settings"
        )
    return grid
