"""What all algorithms do with their losses: backward passes whose shares add up, and sums over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dsreason.job.ranks import gather_objects
from dsreason.train.world.build import WorldRun
from dsreason.train.world.clips import Sample


def backward(world: WorldRun, loss: Tensor, *, last: bool) -> None:
    """The gradient of a share of the step's loss. `last`: the step's last one on this rank.

    The shares of all micro-batches and ranks add up to the loss of the step, however it was cut.
    """
    engine = world.engine
    engine.set_gradient_accumulation_boundary(last)
    # DeepSpeed averages gradients over ranks; the loss is a share of the global one already, so undo that. The ranks of a
    # context-parallel group have the gradients of their own tokens, which add up likewise.
    engine.backward(loss * world.world.size, scale_wrt_gas=False)
    if not last:
        engine.step()


def count_clips(world: WorldRun, part: Sequence[Sample]) -> int:
    """Of an optimizer step, over all ranks."""
    own = sum(len(one.batch) for one in part if one.batch.counted and world.share.leads)
    return sum(gather_objects(own))


def add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def gathered(world: WorldRun, sums: Mapping[str, float]) -> dict[str, float]:
    """The sums over all ranks; of a context-parallel group, whose ranks have the same, one counts."""
    found = gather_objects(dict(sums) if world.share.leads else {})
    names = dict.fromkeys(name for part in found for name in part)
    return {name: sum(part.get(name, 0.0) for part in found) for name in names}
