"""A run's page, `run.html`, which rank 0 writes during training and at the end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from dsreason.errors import DsReasonError

log = logging.getLogger(__name__)

REST = 100
"""Minimum time between two writes of the page, as a multiple of the time that a write takes; it limits the cost to 1 %."""


@dataclass
class RunPage:
    """The page of the run in `folder`. If it cannot be written, a warning is logged and training continues."""

    folder: Path
    seconds: float = 0.0
    """Seconds that the last write took."""
    written: float = field(default_factory=time.perf_counter)

    def update(self) -> None:
        """Write the page, unless it was written only recently (see `REST`)."""
        if time.perf_counter() - self.written >= REST * self.seconds:
            self.write()

    def write(self) -> None:
        # At module level, these imports would load scipy and other slow packages on every rank.
        from dsreason.report.page import write_run_page
        from dsreason.report.run_files import open_run

        started = time.perf_counter()
        try:
            write_run_page(open_run(self.folder))
        except (DsReasonError, OSError) as error:
            log.warning("the page of the run could not be written: %s", error)
        self.written = time.perf_counter()
        self.seconds = self.written - started

    def describe_run(self) -> list[str]:
        """Return the run's results, warnings and next commands as lines for the terminal."""
        from dsreason.report.run_files import open_run
        from dsreason.report.summary import describe_run

        try:
            return describe_run(open_run(self.folder))
        except (DsReasonError, OSError) as error:
            log.warning("the result of the run could not be read: %s", error)
            return []
