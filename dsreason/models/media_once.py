"""Media that a batch repeats go through the vision tower once: the completions of one prompt all show the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def install(vision_tower: nn.Module) -> None:
    """Make the `forward` of this one vision tower compute equal media once; its result stays what it was."""
    vision_tower.forward = partial(forward_once, vision_tower.forward)


def forward_once(forward: Callable[..., Any], hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
    """`forward` of the distinct media, spread over all: patches `[N, dim]` and grids `[media, 3]` in.

    Every tensor of the output has whole rows a medium, in the media's order, and as many a patch for each.
    """
    media = hidden_states.split(grid_thw.prod(-1).tolist())
    numbers, firsts = distinct(media, grid_thw.tolist())
    if len(firsts) == len(media):
        return forward(hidden_states, grid_thw, **kwargs)
    output = forward(torch.cat([media[i] for i in firsts]), grid_thw[firsts], **kwargs)
    sizes = [len(media[i]) for i in firsts]

    def spread(rows: Tensor) -> Tensor:
        parts = rows.split([size * len(rows) // sum(sizes) for size in sizes])
        return torch.cat([parts[number] for number in numbers])

    for name, value in output.items():
        output[name] = spread(value) if isinstance(value, Tensor) else [spread(rows) for rows in value]
    return output


def distinct(media: Sequence[Tensor], grids: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """For each medium its number among the distinct ones, and the places where those first stand."""
    firsts: list[int] = []
    numbers = []
    for i, medium in enumerate(media):
        same = (n for n, j in enumerate(firsts) if grids[i] == grids[j] and torch.equal(medium, media[j]))
        numbers.append(next(same, len(firsts)))
        if numbers[-1] == len(firsts):
            firsts.append(i)
    return numbers, firsts
