"""Functions that format a plan as text or JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dsreason.tools.planning.advice import Suggestion
from dsreason.tools.planning.phases import GIB, PlannedPhase
from dsreason.tools.planning.plan import Plan

KINDS = {"trained": "trained", "frozen": "frozen", "adapter": "in adapters", "nf4": "in 4 bits"}


def write_headline(plan: Plan) -> list[str]:
    """Return the first lines of the report: the run, its machine, and the model's architecture and parameter counts."""
    request = plan.request
    machine, parameters = request.machine, request.parameters
    several = "s" if machine.gpus > 1 else ""
    kinds = [f"{parameters.count_kind(kind):,} {text}" for kind, text in KINDS.items() if parameters.count_kind(kind)]  # type: ignore[arg-type]
    if parameters.num_active < parameters.numel:
        kinds.append(f"{parameters.num_active:,} used per token")
    return [
        f"{request.trainer} of {request.config.model.path} on {machine.gpus} GPU{several} with {machine.gpu_memory:g} GB "
        f"({plan.limit / GIB:.1f} GiB usable), {request.ds_config}",
        f"architecture: {request.architecture.source}",
        f"parameters: {parameters.numel:,}; {', '.join(kinds)}",
    ]


def make_phase_table(plan: Plan) -> Table:
    """Return a table of one GPU's memory in GiB by phase."""
    table = Table(title="GiB per GPU", title_justify="left")
    for name in ("phase", "item", "note"):
        table.add_column(name, overflow="fold")
    table.add_column("GiB", justify="right")
    for phase in plan.phases:
        add_phase(table, phase, f"{phase.total / GIB:.1f} of {plan.limit / GIB:.1f}")
    return table


def make_outside_table(plan: Plan) -> Table:
    table = Table(title="GiB outside the GPUs", title_justify="left")
    for name in ("location", "item", "note"):
        table.add_column(name, overflow="fold")
    table.add_column("GiB", justify="right")
    host = f"memory of {'each host' if plan.request.machine.hosts > 1 else 'the host'}"
    for phase in (PlannedPhase(host, plan.host.items), plan.disk):
        add_phase(table, phase, f"{phase.total / GIB:.0f}")
    return table


def add_phase(table: Table, phase: PlannedPhase, total: str) -> None:
    for number, item in enumerate(phase.items):
        table.add_row(phase.name if number == 0 else "", item.name, item.note, f"{item.nbytes / GIB:.2f}")
    table.add_row("", "[bold]total[/bold]", "", f"[bold]{total}[/bold]", end_section=True)


def write_verdict(plan: Plan, suggestions: list[Suggestion]) -> list[str]:
    if plan.fits:
        fullest = plan.fullest
        room = f"the fullest phase, {fullest.name}, needs {fullest.total / GIB:.1f} of {plan.limit / GIB:.1f} GiB"
        outside = f"{plan.host.total / GIB:.0f} GiB of host memory, {plan.disk.total / GIB:.0f} GiB of disk"
        return [f"fits: {room}; {plan.room / GIB:.1f} GiB to spare", f"also needed: {outside}"]
    lines = ["does not fit:", *(f"  {text}" for text in plan.problems)]
    if suggestions:
        return [*lines, "suggested changes:", *(f"  {suggestion.text}" for suggestion in suggestions)]
    return [
        *lines,
        "no change that was tried, alone or in pairs, makes the run fit; use GPUs with more memory, or a smaller model",
    ]


def to_json(plan: Plan, suggestions: list[Suggestion]) -> dict[str, Any]:
    """Return the plan as JSON. Sizes are in bytes; `phases` describes one GPU, and `host_memory` one host."""
    request = plan.request
    return {
        "trainer": request.trainer,
        "model": request.config.model.path,
        "architecture": request.architecture.source,
        "gpus": request.machine.gpus,
        "gpu_bytes": plan.limit,
        "hosts": request.machine.hosts,
        "ds_config": request.ds_config,
        "parameters": {
            "all": request.parameters.numel,
            "active": request.parameters.num_active,
            **{kind: request.parameters.count_kind(kind) for kind in KINDS},  # type: ignore[arg-type]
        },
        "fits": plan.fits,
        "problems": plan.problems,
        "fullest_phase": plan.fullest.name,
        "room_bytes": plan.room,
        "phases": [phase_to_json(phase) for phase in plan.phases],
        "vllm": plan.vllm.to_json() if plan.vllm else None,
        "rollout_offload_bytes": plan.offloaded,
        "host_memory": phase_to_json(plan.host),
        "disk": phase_to_json(plan.disk),
        "suggestions": [
            {
                "change": suggestion.change.text,
                "set": dict(suggestion.change.sets),
                "ds_config": suggestion.change.ds_config,
                "gpus": suggestion.change.gpus,
                "gpu_bytes": suggestion.plan.fullest.total,
                "host_bytes": suggestion.plan.host.total,
            }
            for suggestion in suggestions
        ],
        "notes": plan.notes,
    }


def phase_to_json(phase: PlannedPhase) -> dict[str, Any]:
    items = [{"name": item.name, "bytes": item.nbytes, "note": item.note} for item in phase.items]
    return {"name": phase.name, "bytes": phase.total, "items": items}
