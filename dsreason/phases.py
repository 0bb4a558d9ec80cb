"""Names for the phases of a step, so that a profile (`monitor.profile`) shows where the time went."""

from __future__ import annotations

from torch.profiler import record_function

PREFIX = "phase: "


def record_phase(name: str) -> record_function:
    """Mark a block in the profile of the current step. Phases may nest; the cost without a profile is microseconds."""
    return record_function(PREFIX + name)
