"""Media that a batch shows several times go through the vision tower once: the completions of one prompt all show the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsreason.families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SharedMediaForward:
    """The `forward` of a vision tower. Inside `shared_media` it takes patches of the distinct media, and grids of all."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.pending: list[Sequence[int]] = []
        """For each of the next calls, the number of every medium among the distinct ones."""

    def __call__(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        """Patches `[N, dim]` and grids `[media, 3]` in; the output has whole rows for all media, in their order."""
        numbers = self.pending.pop(0) if self.pending else range(len(grid_thw))
        if len(numbers) != len(grid_thw):
            raise ValueError(f"{len(grid_thw)} grids for {len(numbers)} media")
        firsts = [numbers.index(number) for number in range(max(numbers) + 1)]
        if len(firsts) == len(numbers):
            return self.forward(hidden_states, grid_thw, **kwargs)
        output = self.forward(hidden_states, grid_thw[firsts], **kwargs)
        sizes = grid_thw[firsts].prod(-1).tolist()

        def spread(rows: Tensor) -> Tensor:
            parts = rows.split([size * len(rows) // sum(sizes) for size in sizes])
            return torch.cat([parts[number] for number in numbers])

        for name, value in output.items():
            output[name] = spread(value) if isinstance(value, Tensor) else [spread(rows) for rows in value]
        return output


def share_media(model: PreTrainedModel, family: Family) -> None:
    """Make the vision tower of this one model object encode a repeated medium once."""
    if family.modules.vision_tower is not None:
        vision_tower = model.get_submodule(family.modules.vision_tower)
        vision_tower.forward = SharedMediaForward(vision_tower.forward)


@contextmanager
def shared_media(vision_tower: PreTrainedModel, media_numbers: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Around a model's forward: `Batch.media_numbers` of its batch. A model embeds its images before its videos."""
    forward: SharedMediaForward = vision_tower.forward
    forward.pending = [media_numbers[kind] for kind in ("image", "video") if kind in media_numbers]
    try:
        yield
    finally:
        forward.pending = []
