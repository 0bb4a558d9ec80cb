"""Functions that format the time estimate as text or JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dsreason.tools.planning.duration.estimate import Duration
from dsreason.tools.planning.duration.rates import GB


def make_time_table(duration: Duration) -> Table:
    """Return a table of the seconds and the limiting resource of each phase of an optimizer step."""
    table = Table(title="seconds per optimizer step", title_justify="left")
    for name in ("phase", "limited by"):
        table.add_column(name, overflow="fold")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    for phase in duration.phases:
        table.add_row(phase.name, phase.limit, f"{phase.seconds:.2f}", f"{phase.seconds / duration.seconds:.0%}")
    table.add_section()
    table.add_row("[bold]total[/bold]", "", f"[bold]{duration.seconds:.2f}[/bold]", "100%")
    return table


def describe_time(duration: Duration) -> list[str]:
    """Return lines that describe the speed, the length of the run, and the assumptions and sources behind these estimates."""
    slowest, rates, load = duration.slowest_phase, duration.rates, duration.load
    lines = [
        f"speed: {duration.tokens_per_second:,.0f} tokens/s on {duration.gpus} {rates.card}; most of the time goes to "
        f"{slowest.name}, limited by {slowest.limit}"
    ]
    if duration.hours is None:
        lines.append("length of the run: unknown; set train.max_steps, or pass --rows")
    else:
        total = duration.hours * duration.gpus
        lines.append(f"length of the run: {duration.steps:,} steps, {duration.hours:,.1f} h, {total:,.1f} GPU hours")
    lines += [
        f"assumed: samples of {load.tokens_per_sample:,} tokens (--tokens-per-sample), {load.media_share:.0%} of them media "
        f"(--media-share), {8 * load.network / GB:g} Gbit/s per GPU between hosts (--network-gbit)",
        f"rates of {rates.card}: {rates.source}; estimates are 1 to 22 % too long for the steps that the rates were fitted to",
        "not counted: startup, rewards, a teacher, rollouts with plain transformers, validation, checkpoints, export",
    ]
    return lines


def time_to_json(duration: Duration) -> dict[str, Any]:
    rates, load = duration.rates, duration.load
    phases = [{"name": phase.name, "seconds": phase.seconds, "limited_by": phase.limit} for phase in duration.phases]
    return {
        "card": rates.card,
        "rates": rates.source,
        "phases": phases,
        "step_seconds": duration.seconds,
        "tokens_per_second": duration.tokens_per_second,
        "steps": duration.steps,
        "hours": duration.hours,
        "gpu_hours": None if duration.hours is None else duration.hours * duration.gpus,
        "tokens_per_sample": load.tokens_per_sample,
        "media_share": load.media_share,
        "network_bytes_per_second": load.network,
    }
