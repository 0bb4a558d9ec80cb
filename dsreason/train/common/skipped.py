"""Rows that training leaves out: counted at every use, and each named once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass
class SkippedRows:
    """What was left out since this process started."""

    count: int = 0
    """Uses of rows; one row may be met in every epoch."""
    named: set[str] = field(default_factory=set)

    def add(self, rows: Sequence[str]) -> None:
        """Count these uses, and log the rows that are new; each text names file, row and reason."""
        self.count += len(rows)
        for text in dict.fromkeys(rows):
            if text not in self.named:
                self.named.add(text)
                log.warning("left out: %s", text)
