"""Labels for the phases of a step, which show where time was spent in a profile (`monitor.profile`)."""

from __future__ import annotations

from torch.profiler import record_function

PREFIX = "phase: "


def record_phase(name: str) -> record_function:
    """Return a context manager that labels its block in the current step's profile.

    Phases may nest. Without a profile, the overhead is a few microseconds.
    """
    return record_function(PREFIX + name)
