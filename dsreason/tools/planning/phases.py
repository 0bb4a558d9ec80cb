"""Parts of a plan: phases of a run, and the contents of a memory during each."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Item:
    name: str
    nbytes: int
    note: str = ""


@dataclass(frozen=True)
class Phase:
    """Example: `Phase("optimizer step", (Item("weights", 2**34),))`."""

    name: str
    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        return sum(item.nbytes for item in self.items)

    def without_empty(self) -> Phase:
        return Phase(self.name, tuple(item for item in self.items if item.nbytes))


def largest(phases: list[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.total)
