"""What the samples of micro-batches ask of the model: the tokens and media that count as work done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsreason.data.collate import GRIDS
from dsreason.data.types import EncodedSample


@dataclass
class Work:
    """Without padding, and without the media that only keep ranks in step."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    """Of each run of tokens that attends causally: how many they are, and how many others they all see before them."""
    trained_tokens: int = 0
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each medium that goes through the vision tower: frames, height and width in patches."""

    @property
    def tokens(self) -> int:
        return sum(length for length, _ in self.spans)


def work_of(groups: Sequence[Sequence[EncodedSample]], *, packing: bool) -> Work:
    """Of micro-batches of these samples. A medium that a micro-batch shows several times is encoded once in it.

    Example: a prompt of 100 tokens and completions of 10 and 20, packed → spans (100, 0), (10, 100), (20, 100); unpacked
    (110, 0), (120, 0).
    """
    found = Work()
    for group in groups:
        parents = {id(sample.parent): sample.parent for sample in group if sample.parent is not None}
        shown = {id(sample): sample for sample in group if sample.parent is None} | parents
        if packing:
            found.spans += [(len(parent), 0) for parent in parents.values()]
        for sample in group:
            before = 0 if sample.parent is None else len(sample.parent)
            found.spans.append((len(sample), before) if packing else (before + len(sample), 0))
            # Nothing predicts the first token of a sample that follows none.
            found.trained_tokens += int(sample.loss_mask[int(sample.parent is None) :].sum())
        for sample in shown.values():
            for key in GRIDS.values():
                if key in sample.mm_kwargs:
                    found.grids += [(t, h, w) for t, h, w in sample.mm_kwargs[key].tolist()]
    return found
