"""Warnings about a run that cannot learn, with statistics from its recent steps and the likely causes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

WINDOW = 10
"""Number of recent steps (GRPO: rollouts) that a warning describes."""
REPEAT_AFTER = 100
"""Minimum number of steps (GRPO: rollouts) between two warnings of the same kind."""


class Counts(Protocol):
    """Counts over all ranks for one step. Adding the counts of several steps gives counts for all of them together."""

    def __add__(self, other: Any, /) -> Any: ...


C = TypeVar("C", bound=Counts)


@dataclass
class LearningWatch(Generic[C]):
    """A monitor that warns if a run cannot learn from its steps. Every rank must add the same counts."""

    find_problems: Callable[[C], dict[str, str]]
    """Function from the counts of several steps to warnings, keyed by the kind of problem."""
    recent: deque[C] = field(default_factory=lambda: deque(maxlen=WINDOW))
    total: C | None = None
    """Sum of the counts of all steps since this process started."""
    num_steps: int = 0
    warned: dict[str, int] = field(default_factory=dict)
    """Kind of problem → step of its last warning."""

    def add(self, counts: C) -> None:
        """Add a step's counts, and log the problems of the last `WINDOW` steps, each at most once every `REPEAT_AFTER` steps."""
        self.num_steps += 1
        self.recent.append(counts)
        self.total = counts if self.total is None else self.total + counts
        if len(self.recent) < WINDOW:
            return
        for kind, message in self.find_problems(reduce(add, self.recent)).items():
            if self.num_steps - self.warned.get(kind, -REPEAT_AFTER) >= REPEAT_AFTER:
                self.warned[kind] = self.num_steps
                log.warning("%s", message)

    def list_recent(self) -> list[str]:
        """Return the warnings about the most recent steps."""
        return list(self.find_problems(reduce(add, self.recent)).values()) if self.recent else []

    def summarize(self) -> list[str]:
        """Return the warnings about all steps since this process started."""
        return [] if self.total is None else list(self.find_problems(self.total).values())
