"""Building blocks of a plan: the phases of a run, and the items in memory or on disk during each phase."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class MemoryItem:
    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class PlannedPhase:
    """Items in the memory of a GPU or host, or on the disk, during a phase of the run.

    Example: `PlannedPhase("optimizer step", (MemoryItem("weights", 2**34),))`.
    """

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    def drop_empty(self) -> PlannedPhase:
        return PlannedPhase(self.name, tuple(item for item in self.items if item.nbytes))


def find_largest(phases: list[PlannedPhase]) -> PlannedPhase:
    return max(phases, key=lambda phase: phase.total)
