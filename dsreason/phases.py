"""Names for the phases of a step, by which a profile (`monitor.profile`) says where the time went."""

from __future__ import annotations

from torch.profiler import record_function

PREFIX = "phase: "


def record_phase(name: str) -> record_function:
    """Mark a block in the profile of the current step. Phases may nest; without a profile this costs microseconds."""
    return record_function(PREFIX + name)
